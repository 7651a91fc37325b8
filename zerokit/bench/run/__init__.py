"""Benches and sweeps from start to end, in the process that launches the ranks."""
