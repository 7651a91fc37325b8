"""Sweeps: many cells, run one after the other."""
