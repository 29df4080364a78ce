"""What every stage shares: records, codec, keys, the broker's verbs. Imports nothing of ours, never torch."""
