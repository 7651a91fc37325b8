"""Imported by the fork servers of `multiprocessing` as they start, which must outlive what their rank takes."""

from zerokit.workers import pass_signals_over

pass_signals_over()
