"""Measurements on a rank: clocks, memory, phases, bandwidth, system metrics and the environment."""
