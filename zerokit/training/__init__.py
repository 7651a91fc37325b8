"""Additions to the training loop on top of the runtime: weight averages, islands, local steps, and stop signals."""

from zerokit.training.ema import Ema
from zerokit.training.islands import ZeroOptimizer
from zerokit.training.local_steps import LocalSteps
from zerokit.training.stopping import StopSignal

__all__ = ["Ema", "LocalSteps", "StopSignal", "ZeroOptimizer"]
