"""The facts that checks judge: what each rank sees, and what ranks measure together.

Plain data: a worker writes it as JSON beside its job, the process that started the ranks reads it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zerokit.bench.machine.speeds import AllReduce, AxisLink, Copies, Paces, Pair
from zerokit.doctor.devices import Device, Devices, look_at_devices
from zerokit.doctor.directory import Directory, look_at_directory
from zerokit.doctor.findings import Seat
from zerokit.doctor.hosts import Host, Processor, look_at_host
from zerokit.doctor.interfaces import Network, look_at_network
from zerokit.doctor.limits import Limits, look_at_limits
from zerokit.doctor.software import Software, look_at_software
from zerokit.offsets import Offset


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The facts that one process collects alone."""

    seat: Seat
    software: Software
    devices: Devices
    network: Network
    limits: Limits
    processor: Processor
    directory: Directory
    host: Host


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The facts that ranks measure together; lists are by rank."""

    offsets: list[Offset]  # of the ranks' clocks
    routes: list[str | None]  # how ranks read neighbours' tensors; None for one that is alone on its node
    # Whether each rank saw a file of rank 0 in the run directory; None where it could not write.
    seen: list[bool] | None
    all_reduce: AllReduce | None  # over all ranks
    pairs: list[Pair] = field(default_factory=list)  # of nodes; empty unless asked for
    # The ranks of a node, and the nodes; without an axis of one rank.
    axes: list[AxisLink] = field(default_factory=list)
    paces: Paces | None = None  # how fast hosts compute; None on devices, and for one rank
    copies: Copies | None = None  # between devices and pinned memory of their hosts; None on hosts


def look_around(seat: Seat, directory: Path, trial_bytes: int, used: Device | None = None) -> RankFacts:
    """Everything that this process sees by itself; `trial_bytes` are written to see how long it takes."""
    host, processor = look_at_host()
    return RankFacts(
        seat=seat,
        software=look_at_software(),
        devices=look_at_devices(used),
        network=look_at_network(),
        limits=look_at_limits(),
        processor=processor,
        directory=look_at_directory(directory, trial_bytes),
        host=host,
    )


def own_seat(environment: Mapping[str, str]) -> Seat:
    """The seat of this process in torchrun's environment; without one, the first of the first node."""
    host = socket.gethostname()
    return Seat(
        rank=int(environment.get("RANK", "0")),
        node=int(environment.get("GROUP_RANK", "0")),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        host=host,
        machine="/".join([host, *_identity()]),
    )


def _identity() -> list[str]:
    """What containers and virtual machines of one host name differ in: their boot, and their network."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, str(os.stat("/proc/self/ns/net").st_ino)]
    except OSError:
        return []
