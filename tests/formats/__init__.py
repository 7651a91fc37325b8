"""Checkpoints of other frameworks, made by the real ones: see `make_fixtures` and `scripts/peers`."""
