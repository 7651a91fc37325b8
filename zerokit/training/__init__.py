"""Beside the training loop, on top of the runtime: averages of the weights, and when it is time to stop."""

from zerokit.training.ema import Ema
from zerokit.training.stopping import StopSignal

__all__ = ["Ema", "StopSignal"]
