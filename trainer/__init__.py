"""The trainer: batches, losses, the loop, weights and checkpoints."""
