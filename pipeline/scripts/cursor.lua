-- keys: feed state
-- flags: no-writes
-- Prompts fed so far. Where that is lost, only the run's trainer can say it again: LOST is waited out.
return fed()
