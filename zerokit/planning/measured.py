"""A device's speed, from a record of `zerokit bench` on one device or one node. Standard library only.

The update moves a known number of bytes, which gives the memory's speed; forward and backward, with the same schedule
and the same copies that a plan counts, give the speed of products. A record of one rank says how fast that rank is
alone: those that share a machine are slower, by what the doctor measured (`beside`). A record of the node's
compute-only engine includes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

from zerokit.errors import UsageError
from zerokit.planning.efficiency import ELEMENT_BYTES, Efficiency
from zerokit.planning.hardware import Cluster, Device, Link, Sharing
from zerokit.planning.timeline import Plan, step_time

_BALANCE = 4.0
"""FLOPs of fp32 that a core multiplies while it moves a byte: divides a measured pass between products and the rest,
where the doctor did not measure how fast it multiplies."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step without communication, from a record.

    Attributes:
        passes_s: forward and backward of all micro-batches.
        update_s: clipping and the optimizer's update.
        threads: of a rank; a plan is for ranks with as many.
        ranks: that ran on the node at once.
        fills_buckets: whether gradients were copied into buckets, as zerokit's own engine does.
    """

    passes_s: float
    update_s: float
    threads: int
    ranks: int
    fills_buckets: bool = True


def measured_step(record: Mapping[str, Any]) -> MeasuredStep:
    """The step of a parsed record. Raises `UsageError` for one whose steps contain communication."""
    settings, environment = record["settings"], record["environment"]
    world = settings["nodes"] * settings["nproc_per_node"]
    if record["status"] != "ok":
        raise UsageError(
            f"the record's bench ended {record['status']}: give the record of one that succeeded"
        )
    if settings["nodes"] > 1 or (world > 1 and settings["engine"] != "compute-only"):
        raise UsageError(
            f"the record is of {world} ranks that communicate: give one of a single rank (--nproc-per-node 1), or of "
            "one node without communication (--engine compute-only)"
        )
    phases = record["phases"]
    if settings["stage"] == 3 and settings["engine"] == "zerokit" and environment["accelerator"] is None:
        raise UsageError(
            "the record is of stage 3, which on hosts hands memory back to the system in every step: give one of "
            "stages 0 to 2"
        )
    if phases is None:
        raise UsageError("the record has no phases of a step: repeat the bench with this version")
    step_s = max(median(rank["step_ms"]) for rank in record["ranks"]) / 1e3
    parts = phases["forward_ms"] + phases["backward_ms"] + phases["optimizer_ms"]
    update_s = step_s * phases["optimizer_ms"] / parts  # the parts are waited for one by one
    own = settings["engine"] == "zerokit"
    return MeasuredStep(step_s - update_s, update_s, environment["threads"], world, fills_buckets=own)


def measured_efficiency(
    measured: MeasuredStep,
    plan: Plan,
    dtype: str,
    nominal: Efficiency | None = None,
    sharing: Sharing | None = None,
) -> Efficiency:
    """The speeds at which `plan`, that of the measured bench, takes as long as was measured.

    Args:
        measured: steps without communication.
        plan: of the same model, batch, precision and ranks.
        dtype: of products.
        nominal: what is known of the device; by default a CPU's balance of products and bytes.
        sharing: what is known of a host.
    """
    world = plan.placement.mesh.world
    alone = Cluster(Device("one"), world, Link(0.0, inf))
    if nominal is None:
        guess = Efficiency(1e12, (1e12, 1e12), 1e12, ELEMENT_BYTES[dtype])
        speed = guess.memory_bytes_per_s * step_time(plan, alone, guess).optimizer_s / measured.update_s
        flops = speed * _BALANCE if sharing is None else sharing.flops
        nominal = Efficiency(flops, (flops, flops), speed, ELEMENT_BYTES[dtype])
    # The copies of gradients move bytes at the memory's speed; the scale is of the passes beside them.
    once, twice = (step_time(plan, alone, replace(nominal, scale=scale)).compute_s for scale in (1.0, 2.0))
    copies = 2 * once - twice if measured.fills_buckets else 0.0
    return replace(nominal, scale=max(measured.passes_s - copies, 0.0) / (twice - once))


def beside(efficiency: Efficiency, sharing: Sharing) -> Efficiency:
    """The speed of a rank while all ranks of its machine compute."""
    return replace(
        efficiency,
        scale=efficiency.scale * sharing.passes,
        moving=efficiency.moving * sharing.memory,
        page_s=sharing.page_s,
    )
