"""NCCL's communicators of zerokit's own: made once for the ranks of a group, and connected before the first step."""

from __future__ import annotations

import datetime
import os
import weakref
from dataclasses import dataclass, replace
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
    exchanges: bool = False
    """Whether all-to-alls have been rehearsed."""


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
    key = mesh, timeout
    if key in made and (made[key].exchanges or not packs):
        return made[key]
    with reporter.waiting("creation of communicators"):
        found = made.get(key) or _make(group, mesh, timeout, device, backend)
        if backend == "nccl":
            if key not in made:
                _rehearse(found, device)
            if packs:
                _rehearse_exchanges(found, device)
            torch.cuda.synchronize(device)
    made[key] = replace(found, exchanges=packs)
    return made[key]


def _make(
    group: dist.ProcessGroup,
    mesh: Mesh,
    timeout: datetime.timedelta | None,
    device: torch.device,
    backend: str,
) -> Communicators:
    # Before any of them: devices then keep the host's order of launches, also beside collectives of the program.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    make = partial(clone, group, backend, timeout, device if backend == "nccl" else None)
    # On two axes it also carries whole tensors to their owners.
    control = make(small=mesh.outer == 1)
    inner = mesh.members(Axis.INNER, group.rank()) if mesh.outer > 1 else None
    axes = [] if inner is None else [(make(mesh.members(Axis.OUTER, group.rank())),) * 2]
    axes.append((make(inner), make(inner)))
    return Communicators(control, tuple(axes))


def _rehearse(communicators: Communicators, device: torch.device) -> None:
    """Let NCCL make its connections now, which depend on operation and size: not in the middle of a step."""
    dist.all_reduce(torch.zeros(1, dtype=torch.float64, device=device), group=communicators.control)
    for gather, reduce in communicators.axes:
        size = gather.size()
        whole = _rehearsed(size, device)
        own = whole.chunk(size)[gather.rank()]
        all_gather(whole, own, group=gather)
        reduce_scatter(own, whole, op=dist.ReduceOp.AVG if size > 1 else dist.ReduceOp.SUM, group=reduce)


def _rehearse_exchanges(communicators: Communicators, device: torch.device) -> None:
    for _, reduce in communicators.axes:
        whole = _rehearsed(reduce.size(), device)
        dist.all_to_all_single(torch.empty_like(whole), whole, group=reduce)


def _rehearsed(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size * (_REHEARSED_NUMEL // size), device=device)
