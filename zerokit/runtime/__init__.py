"""The ZeRO runtime: one optimizer over flat units; stages are policies over the same layout.

Read in this order: `precision`, `storage`, `collectives`, `gathering`, `gradients`, `optimizer`.
"""

from zerokit.formulas import MemoryReport, TrafficReport
from zerokit.runtime.optimizer import ZeroOptimizer
from zerokit.runtime.precision import LossScale, Precision

__all__ = ["LossScale", "MemoryReport", "Precision", "TrafficReport", "ZeroOptimizer"]
