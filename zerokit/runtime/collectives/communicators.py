"""NCCL's communicators of zerokit's own: made once for the ranks of a group, and connected before the first step."""

from __future__ import annotations

import datetime
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zerokit.placement import Axis, Mesh
from zerokit.runtime.collectives.groups import clone
from zerokit.runtime.collectives.stalls import StallReporter

# torch 2.13 renamed both and warns about the old names.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_REHEARSED_NUMEL = 4 << 20  # 16 MiB, the default size of a large model's buckets


@dataclass(frozen=True, slots=True)
class Communicators:
    """The communicators for control values, and for gathers and reductions over each axis (outer: one for both)."""

    control: dist.ProcessGroup
    axes: tuple[tuple[dist.ProcessGroup, dist.ProcessGroup], ...]


_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Communicators]] = weakref.WeakKeyDictionary()
"""Those of each process group that lives, by mesh and time-out: later optimizers take them over."""


def communicators_of(
    group: dist.ProcessGroup,
    mesh: Mesh,
    device: torch.device,
    timeout: datetime.timedelta | None,
    reporter: StallReporter,
    *,
    packs: bool = False,
    backend: str = "nccl",
) -> Communicators:
    """Communicators over the ranks of `group`, ready for use; made once a group. Another backend serves tests.

    `packs`: whether reductions are all-to-alls, whose connections take gigabytes of each device.
    """
    made = _MADE.setdefault(group, {})
    if (key := (mesh, timeout, packs)) in made:
        return made[key]
    # Before any of them: devices then keep the host's order of launches, also beside collectives of the program.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    make = partial(clone, group, backend, timeout, device if backend == "nccl" else None)
    with reporter.waiting("creation of communicators"):
        # On two axes it also carries whole tensors to their owners.
        control = make(small=mesh.outer == 1)
        inner = mesh.members(Axis.INNER, group.rank()) if mesh.outer > 1 else None
        axes = [] if inner is None else [(make(mesh.members(Axis.OUTER, group.rank())),) * 2]
        axes.append((make(inner), make(inner)))
        if backend == "nccl":
            _rehearse(control, axes, device, packs=packs)
    made[key] = Communicators(control, tuple(axes))
    return made[key]


def _rehearse(
    control: dist.ProcessGroup,
    axes: Sequence[tuple[dist.ProcessGroup, dist.ProcessGroup]],
    device: torch.device,
    *,
    packs: bool,
) -> None:
    """Let NCCL make its connections now, which depend on operation and size: not in the middle of a step."""
    dist.all_reduce(torch.zeros(1, dtype=torch.float64, device=device), group=control)
    for gather, reduce in axes:
        size = gather.size()
        whole = torch.zeros(size * (_REHEARSED_NUMEL // size), device=device)
        own = whole.chunk(size)[gather.rank()]
        all_gather(whole, own, group=gather)
        reduce_scatter(own, whole, op=dist.ReduceOp.AVG if size > 1 else dist.ReduceOp.SUM, group=reduce)
        if packs:
            dist.all_to_all_single(torch.empty_like(whole), whole, group=reduce)
    torch.cuda.synchronize(device)
