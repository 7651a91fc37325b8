"""A bench as plain data: its settings, its measurements, and the results computed from them.

Nothing here imports another room of the bench.
"""
