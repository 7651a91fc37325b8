"""The runtime's collectives: `base` counts every byte, and routes move it.

route     the seam between both: the ranks of one axis, and the wire; by itself a rank alone, for predictions
base      a unit's hops over the axes of the mesh, the count of bytes, control values
groups    process groups of zerokit's own
stalls    names what ranks wait for
streams   CUDA: work on side streams, ordered by events
communicators, nccl
          CUDA: NCCL's collectives on such streams
predicted CUDA: one rank whose others do not exist
host      hosts: neighbours' memory, and sockets
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from zerokit.errors import UsageError
from zerokit.placement import Mesh
from zerokit.runtime.collectives.base import Collectives, Exchange
from zerokit.runtime.collectives.communicators import communicators_of
from zerokit.runtime.collectives.groups import imagine_axes, timeout_of
from zerokit.runtime.collectives.host import make_host
from zerokit.runtime.collectives.nccl import make_nccl, require_current_device
from zerokit.runtime.collectives.predicted import predict_nccl
from zerokit.runtime.collectives.route import DONE, Kind, Parcels, Route, Wire, Work
from zerokit.runtime.collectives.stalls import StallReporter

__all__ = ["DONE", "Collectives", "Exchange", "Kind", "Parcels", "Wire", "Work", "make_collectives"]

_GRACE = datetime.timedelta(minutes=1)


def make_collectives(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: datetime.timedelta | None,
    *,
    units: int,
    mesh: Mesh | None = None,
    packs: bool = False,
) -> Collectives:
    """The collectives for `device` over communicators of their own with the ranks of `group`, for `units` units.

    Without a mesh there is one axis; on hosts whose nodes have several ranks each, nodes are the outer axis. `packs`:
    whether gradients travel in a narrower form than the one they are summed in.
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
    if backend == "gloo":
        return make_host(group, mesh, device, reporter, waits, units)
    if backend == "nccl":
        # NCCL's watchdog counts from a collective's launch, `until` from the host's wait for it, up to a step later: it
        # would end the process before ranks and units are named.
        communicators = communicators_of(group, shape, device, 2 * waits + _GRACE, reporter, packs=packs)
        return make_nccl(communicators, shape, device, reporter, waits)
    if device.type == "cuda":
        return predict_nccl(group, shape, device, reporter, waits)
    routes = [Route(one, reporter) for one in imagine_axes(group, shape)]
    return Collectives(group, shape, routes, device, reporter, waits, Route(group, reporter))


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that `group` uses for `device`: a group may hold "cpu:gloo,cuda:nccl"."""
    name = str(dist.get_backend_config(group)).lower()
    by_device = dict(part.split(":", 1) for part in name.split(",") if ":" in part)
    forgotten = device.type == "cpu" and torch.cuda.is_available()  # a machine with GPUs trains on them
    if by_device and "nccl" in by_device.values() and (device.type not in by_device or forgotten):
        return "nccl"  # which reports what is wrong with the device
    return by_device.get(device.type, name)
