"""Additions to the training loop on the runtime: batches, pace, weight averages, islands, local steps, stop signals."""

from zerokit.training.batches import Batches
from zerokit.training.ema import Ema
from zerokit.training.islands import ZeroOptimizer
from zerokit.training.local_steps import LocalSteps
from zerokit.training.pace import Pace
from zerokit.training.stopping import StopSignal

__all__ = ["Batches", "Ema", "LocalSteps", "Pace", "StopSignal", "ZeroOptimizer"]
