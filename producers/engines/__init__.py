"""Engines: what turns prompt tokens into sampled tokens."""
