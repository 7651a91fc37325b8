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
    wire        the dtype in which gradients cross between ranks, where that is not the one they are summed in
    guarded     a parameter while the model does not run: zerokit intercepts every access to it

One step at stage 3, in order
    1. forward: entering a unit's module issues the operations that precede it in the schedule, waits for its own
       gather, and issues the next one; leaving it, and entering another, frees it (`walk`, `gathering`, `schedule`).
    2. backward: an output's gradient arrives, a hook gathers the unit that made it; when the last gradient of a unit
       has arrived in its bucket, the bucket is reduced into the shard (`walk`, `gathering`, `gradients`, `buckets`).
    3. `clip_grad_norm_` sums squares of shards in fp64, over ranks too, and scales them; on CUDA the host reads none of
       it (`step`).
    4. `step` compares what ranks have done, lets the torch optimizer update the masters (`step`), and writes them back
       to the shards (`unit`). At stages 1 and 2 every rank then gathers what the others have updated (`gathering`).

Read in this order: `precision`, `memory`, `guard`, `collectives` (`base`, then one route), `masters`, `unit`,
`buckets`, `gradients`, `schedule`, `order`, `gathering`, `walk`, `step`, `build`, `optimizer`. Each imports only those
before it.
PATTERNS.md lists ways to train, and what becomes of each at every stage.
"""

from zerokit.formulas import MemoryReport, TrafficReport
from zerokit.runtime.optimizer import ZeroOptimizer
from zerokit.runtime.precision import LossScale, Precision

__all__ = [
    "LossScale",
    "MemoryReport",
    "Precision",
    "TrafficReport",
    "ZeroOptimizer",
]
