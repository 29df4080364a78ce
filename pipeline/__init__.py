"""What every stage shares: the records, the codec, the keys, the broker's verbs. Imports nothing of ours, never torch."""
