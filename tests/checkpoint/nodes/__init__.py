"""Checkpoints that lie in several nodes' own directories."""
