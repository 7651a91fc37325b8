"""Additions to the training loop on the runtime: even batches, weight averages, islands, local steps, stop signals."""

from zerokit.training.batches import Batches
from zerokit.training.ema import Ema
from zerokit.training.islands import ZeroOptimizer
from zerokit.training.local_steps import LocalSteps
from zerokit.training.stopping import StopSignal

__all__ = ["Batches", "Ema", "LocalSteps", "StopSignal", "ZeroOptimizer"]
