"""The side that makes groups: prompt files, feeder, generator, engines, rewards."""
