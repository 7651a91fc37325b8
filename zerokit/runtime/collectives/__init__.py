"""Every byte that the runtime sends: `base` counts it, and each route is a module of its own.

base      the mesh, the count of bytes, control values; a unit's hops over the axes
nccl      CUDA: NCCL's collectives on streams of their own
sockets   hosts: point-to-point messages of gloo, and how collectives follow each other
host      an axis on one node: its ranks read each other's memory (`node`)
fake      nothing moves, for predictions
stalls    names what ranks wait for
"""

from __future__ import annotations

import datetime
from collections import Counter

import torch
import torch.distributed as dist

from zerokit.errors import UsageError
from zerokit.placement import Mesh
from zerokit.runtime.collectives.base import Collectives, Counters, Done, PendingNumbers, Work, clone
from zerokit.runtime.collectives.fake import FakeCollectives, FakeRoute
from zerokit.runtime.collectives.host import MemoryRoute
from zerokit.runtime.collectives.nccl import communicators_of, make_nccl, require_current_device
from zerokit.runtime.collectives.node import meet, node_number
from zerokit.runtime.collectives.sockets import HostCollectives, Progress, SocketRoute
from zerokit.runtime.collectives.stalls import StallReporter

__all__ = ["Collectives", "Counters", "Done", "PendingNumbers", "Work", "make_collectives"]

_GRACE = datetime.timedelta(minutes=1)


def make_collectives(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: datetime.timedelta | None,
    *,
    units: int,
    mesh: Mesh | None = None,
) -> Collectives:
    """The collectives that serve `device` over communicators of their own, made like `group`, for `units` units.

    Without a mesh there is one axis, but on hosts whose nodes have several ranks each: there the nodes are the outer
    axis.
    """
    backend = _backend_of(group, device)
    reporter = StallReporter(group)
    if backend == "nccl":
        require_current_device(device)
    if timeout is None and backend != "fake":
        # A new group would wait for the backend's default time, however short the given group's is.
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
    waits = timeout or dist.default_pg_timeout
    line = Mesh(1, group.size())
    if backend == "fake":
        shape = mesh or line
        members = {axis: shape.members(axis, group.rank()) for axis in shape.axes}
        routes = [
            FakeRoute(dist.ProcessGroup(ranks.index(group.rank()), len(ranks)), reporter)  # type: ignore[call-arg]
            for ranks in members.values()
        ]
        return FakeCollectives(group, shape, routes, device, reporter, waits)
    if backend == "gloo":
        with reporter.waiting("creation of communicators"):
            own = clone(group, "gloo", timeout)
            shape = mesh or _mesh_of_nodes(own) or line
            progress = Progress(waits.total_seconds())
            groups = (
                [own]
                if shape.outer == 1
                else [
                    clone(group, "gloo", timeout, members=shape.members(axis, own.rank()))
                    for axis in shape.axes
                ]
            )
            hosts = [
                SocketRoute(axis, reporter, progress)
                if (neighbours := meet(axis, units)) is None
                else MemoryRoute(axis, reporter, progress, neighbours)
                for axis in groups
            ]
        return HostCollectives(own, shape, hosts, device, reporter, waits, progress)
    if backend == "nccl":
        # NCCL's watchdog counts from a collective's launch, `until` from the host's wait for it, up to a step later: it
        # would end the process before ranks and units are named.
        shape = mesh or line
        communicators = communicators_of(group, shape, device, 2 * waits + _GRACE, reporter)
        return make_nccl(communicators, shape, device, reporter, waits)
    raise UsageError(
        f"zerokit has no collectives for backend {backend!r} on {device.type}: "
        "initialise the process group with 'nccl' (CUDA) or 'gloo'"
    )


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
