"""Rewards: what scores a sample, or a whole group."""
