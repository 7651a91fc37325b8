"""The runtime's collectives: `base` counts every byte, and each route is a separate module.

base      the mesh, the count of bytes, control values; a unit's hops over the axes; a rank alone, for predictions
groups    process groups of zerokit's own
nccl      CUDA: NCCL's collectives on streams of their own
host      hosts: how collectives follow each other, over one of two routes
sockets   point-to-point messages of gloo
memory    an axis on one node: its ranks read each other's memory (`node`)
stalls    names what ranks wait for
"""

from __future__ import annotations

import datetime
from collections import Counter

import torch
import torch.distributed as dist

from zerokit.errors import UsageError
from zerokit.placement import Mesh
from zerokit.runtime.collectives.base import DONE, Collectives, Exchange, Route, Wire, Work
from zerokit.runtime.collectives.groups import clone, destroy_unused_groups, timeout_of
from zerokit.runtime.collectives.host import HostCollectives, Progress
from zerokit.runtime.collectives.memory import MemoryRoute
from zerokit.runtime.collectives.nccl import communicators_of, make_nccl, require_current_device
from zerokit.runtime.collectives.node import meet, node_number
from zerokit.runtime.collectives.sockets import SocketRoute
from zerokit.runtime.collectives.stalls import StallReporter

__all__ = ["DONE", "Collectives", "Exchange", "Wire", "Work", "make_collectives"]

_GRACE = datetime.timedelta(minutes=1)


def make_collectives(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: datetime.timedelta | None,
    *,
    units: int,
    mesh: Mesh | None = None,
) -> Collectives:
    """The collectives for `device` over communicators of their own with the ranks of `group`, for `units` units.

    Without a mesh there is one axis; on hosts whose nodes have several ranks each, nodes are the outer axis.
    """
    backend = _backend_of(group, device)
    if backend not in ("fake", "gloo", "nccl"):
        raise UsageError(
            f"zerokit has no collectives for backend {backend!r} on {device.type}: "
            "initialise the process group with 'nccl' (CUDA) or 'gloo'"
        )
    reporter = StallReporter(group)
    shape = mesh or Mesh(1, group.size())
    if backend == "nccl":
        require_current_device(device)
    if timeout is None and backend != "fake":
        timeout = timeout_of(group, device)
    waits = timeout or dist.default_pg_timeout
    if backend == "nccl":
        # NCCL's watchdog counts from a collective's launch, `until` from the host's wait for it, up to a step later: it
        # would end the process before ranks and units are named.
        communicators = communicators_of(group, shape, device, 2 * waits + _GRACE, reporter)
        return make_nccl(communicators, shape, device, reporter, waits)
    if backend == "fake":
        members = [shape.members(axis, group.rank()) for axis in shape.axes]
        fakes = [dist.ProcessGroup(ranks.index(group.rank()), len(ranks)) for ranks in members]  # type: ignore[call-arg]
        routes = [Route(one, reporter) for one in fakes]
        return Collectives(group, shape, routes, device, reporter, waits)
    with reporter.waiting("creation of communicators"):
        destroy_unused_groups(group)
        own = clone(group, "gloo", timeout)
        shape = mesh or _mesh_of_nodes(own) or shape
        axes = [own]
        if shape.outer > 1:
            axes = [
                clone(group, "gloo", timeout, members=shape.members(axis, own.rank())) for axis in shape.axes
            ]
        progress = Progress(waits.total_seconds(), reporter)
        hosts = [
            SocketRoute(axis, progress)
            if (neighbours := meet(axis, units)) is None
            else MemoryRoute(axis, progress, neighbours)
            for axis in axes
        ]
    made = HostCollectives(own, shape, hosts, device, reporter, waits, progress=progress)
    made.own(list(dict.fromkeys((own, *axes))), like=group)
    return made


def _mesh_of_nodes(group: dist.ProcessGroup) -> Mesh | None:
    """Nodes × ranks, where several nodes have equally many ranks that follow each other; else None."""
    nodes = torch.zeros(group.size(), dtype=torch.int64)
    nodes[group.rank()] = node_number()
    dist.all_reduce(nodes, group=group)
    ranks = nodes.tolist()
    sizes = set(Counter(ranks).values())
    size = sizes.pop()
    apart = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    if sizes or size in (1, len(ranks)) or any(len(set(one)) > 1 for one in apart):
        return None
    return Mesh(len(apart), size)


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that `group` uses for `device`: a group may hold "cpu:gloo,cuda:nccl"."""
    name = str(dist.get_backend_config(group)).lower()
    by_device = dict(part.split(":", 1) for part in name.split(",") if ":" in part)
    forgotten = device.type == "cpu" and torch.cuda.is_available()  # a machine with GPUs trains on them
    if by_device and "nccl" in by_device.values() and (device.type not in by_device or forgotten):
        return "nccl"  # which reports what is wrong with the device
    return by_device.get(device.type, name)
