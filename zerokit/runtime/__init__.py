"""The ZeRO runtime: one optimizer over flat units; stages shard the same layout to different degrees.

Words
    line        all parameters of a model in order, as one line of elements
    unit        parameters that are communicated together, in one flat storage; the *rest* are those outside units'
                modules, which the root module may use at any time
    whole       a unit's storage with every element of it; at stage 3 it has memory while the unit is *gathered*
    shard       one rank's interval of a unit
    master      what the optimizer updates, in its precision: a stretch of a shard, one for each group; the
                shard itself where compute has the same precision
    bucket      memory in which a unit's gradients are collected before they are summed over ranks
    wire        the form in which gradients cross between ranks, where that is not the dtype they are summed in; `wires`
                has those of small integers
    guarded     a parameter while the model does not run: zerokit intercepts every access to it

docs/architecture.md tells a step at stage 3, and the order in which to read the modules: each imports only those
before it. PATTERNS.md lists ways to train, and what becomes of each at every stage.
"""

from zerokit.formulas import MemoryReport, TrafficReport
from zerokit.runtime.optimizer import ZeroOptimizer
from zerokit.runtime.precision import LossScale, Precision
from zerokit.runtime.whole import release

__all__ = ["LossScale", "MemoryReport", "Precision", "TrafficReport", "ZeroOptimizer", "release"]
