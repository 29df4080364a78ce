"""The side that takes groups: the drain, staleness, sample filters. Never imports torch."""
