"""Every byte that the runtime sends: `base` counts it, and each route is a module of its own.

nccl    CUDA: NCCL's collectives on streams of their own
gloo    sockets: point-to-point messages
host    all ranks on one node: they read each other's memory, or share some; gloo carries control values
nodes   several nodes: the same within each, sockets between them
fake    nothing moves, for predictions
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from zerokit.errors import UsageError
from zerokit.runtime.collectives.base import Collectives, Counters, Done, Reading, Work, clone
from zerokit.runtime.collectives.fake import FakeCollectives
from zerokit.runtime.collectives.gloo import GlooCollectives
from zerokit.runtime.collectives.host import HostCollectives
from zerokit.runtime.collectives.nccl import NcclCollectives, communicators_of, require_own_device
from zerokit.runtime.collectives.neighbours import meet
from zerokit.runtime.collectives.nodes import NodesCollectives
from zerokit.runtime.watch import Watch

__all__ = ["Collectives", "Counters", "Done", "Reading", "Work", "make_collectives"]


_GRACE = datetime.timedelta(minutes=1)


def make_collectives(
    group: dist.ProcessGroup, device: torch.device, timeout: datetime.timedelta | None, *, units: int
) -> Collectives:
    """The collectives that serve `device` over communicators of their own, made like `group`, for `units` units."""
    backend = _backend_of(group, device)
    watch = Watch(group)
    if backend == "nccl":
        require_own_device(group, device)
    if timeout is None and backend != "fake":
        # A new group would wait for the backend's default time, however short the given group's is.
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
    waits = timeout or dist.default_pg_timeout
    if backend == "fake":
        return FakeCollectives(group, device, watch, waits)
    if backend == "gloo":
        with watch.waiting("creation of a communicator"):
            own = clone(group, "gloo", timeout)
            neighbours = meet(own, units)
        if neighbours is None:
            return GlooCollectives(own, device, watch, waits)
        everyone = len(neighbours.peers) == own.size() - 1
        return (HostCollectives if everyone else NodesCollectives)(own, device, watch, neighbours, waits)
    if backend == "nccl":
        # NCCL's watchdog counts from a collective's launch, `until` from the host's wait for it, up to a step later: it
        # would end the process before ranks and units are named.
        communicators = communicators_of(group, device, 2 * waits + _GRACE, watch)
        return NcclCollectives(communicators, device, watch, waits)
    raise UsageError(
        f"zerokit has no collectives for backend {backend!r} on {device.type}: "
        "initialise the process group with 'nccl' (CUDA) or 'gloo'"
    )


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that `group` uses for `device`: a group may hold "cpu:gloo,cuda:nccl"."""
    name = str(dist.get_backend_config(group)).lower()
    by_device = dict(part.split(":", 1) for part in name.split(",") if ":" in part)
    forgotten = device.type == "cpu" and torch.cuda.is_available()  # a machine with GPUs trains on them
    if by_device and "nccl" in by_device.values() and (device.type not in by_device or forgotten):
        return "nccl"  # which reports what is wrong with the device
    return by_device.get(device.type, name)
