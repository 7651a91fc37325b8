"""Routes between hosts' memory: gloo makes the groups and carries control values.

progress  collectives in flight, how a waiting rank continues to serve the others, and the base of both routes
sockets   point-to-point messages of gloo
memory    an axis on one node: its ranks read each other's memory (`node`)
"""

from __future__ import annotations

import datetime
from collections import Counter

import torch
import torch.distributed as dist

from zerokit.placement import Mesh
from zerokit.runtime.collectives.groups import clone, destroy_unused_groups
from zerokit.runtime.collectives.host.memory import MemoryRoute
from zerokit.runtime.collectives.host.node import meet, node_number
from zerokit.runtime.collectives.host.progress import HostCollectives, HostRoute, Progress
from zerokit.runtime.collectives.host.sockets import SocketRoute
from zerokit.runtime.collectives.stalls import StallReporter

__all__ = ["HostCollectives", "make_host"]


def make_host(
    group: dist.ProcessGroup,
    mesh: Mesh | None,
    device: torch.device,
    reporter: StallReporter,
    timeout: datetime.timedelta,
    units: int,
) -> HostCollectives:
    """Collectives over gloo groups of their own with the ranks of `group`, for `units` units; CPU or CUDA tensors.

    Without a mesh, nodes are the outer axis where each has several ranks that follow each other.
    """
    with reporter.waiting("creation of communicators"):
        destroy_unused_groups(group)
        own = clone(group, "gloo", timeout)
        shape = mesh or _mesh_of_nodes(own)
        axes = [own]
        if shape.outer > 1:
            axes = [
                clone(group, "gloo", timeout, members=shape.members(axis, own.rank())) for axis in shape.axes
            ]
        progress = Progress(timeout.total_seconds(), reporter)
        routes = [_route(axis, progress, units) for axis in axes]
        between_all = _route(own, progress, units) if shape.outer > 1 else None
    made = HostCollectives(own, shape, routes, device, reporter, timeout, between_all, progress=progress)
    made.own(list(dict.fromkeys((own, *axes))), like=group)
    return made


def _route(group: dist.ProcessGroup, progress: Progress, units: int) -> HostRoute:
    neighbours = meet(group, units)
    return SocketRoute(group, progress) if neighbours is None else MemoryRoute(group, progress, neighbours)


def _mesh_of_nodes(group: dist.ProcessGroup) -> Mesh:
    """Nodes × ranks, where several nodes have equally many ranks that follow each other; else one axis."""
    nodes = torch.zeros(group.size(), dtype=torch.int64)
    nodes[group.rank()] = node_number()
    dist.all_reduce(nodes, group=group)
    ranks = nodes.tolist()
    sizes = set(Counter(ranks).values())
    size = sizes.pop()
    apart = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    if sizes or size in (1, len(ranks)) or any(len(set(one)) > 1 for one in apart):
        return Mesh(1, len(ranks))
    return Mesh(len(apart), size)
