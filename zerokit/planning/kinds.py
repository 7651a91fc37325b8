"""Kinds of devices in one job: which ranks have which, and the shares and paces that suit them.

--devices h100-80x4,l40s-48x4

rank    0  1  2  3 | 4  5  6  7
kind    h100-80    | l40s
spare   60 GiB     | 28 GiB          what stays for sharded state
shares  32         | 15              in proportion to it
pace    2.7        | 1               in proportion to speed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby

import numpy as np

from zerokit.errors import UsageError
from zerokit.placement import Mesh
from zerokit.planning.efficiency import Efficiency
from zerokit.planning.hardware import Device, Link, device_named
from zerokit.training.partition import share_out

LARGEST_SHARE = 32
"""The share of the kind with most to spare: finer ones move less than the memory that a plan does not count."""
_MOST_RANKS = 1 << 14


@dataclass(frozen=True)
class Kind:
    """Devices of one kind, and the ranks that have one, ascending.

    `efficiencies` is the device's speed by precision; one that is not there is not known.
    """

    device: Device
    ranks: tuple[int, ...]
    efficiencies: Mapping[str, Efficiency] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.device.name


def parse_devices(text: str) -> tuple[Kind, ...]:
    """The kinds of devices in a text such as `h100-80x4,l40s-48x4`, by rank; a kind that is named again goes on.

    Raises `UsageError` for an unknown device, and for what is no number above 0.
    """
    ranks: dict[str, list[int]] = {}
    devices: dict[str, Device] = {}
    world = 0
    for part in text.split(","):
        name, _, number = part.strip().rpartition("x")
        count = int(number) if number.isascii() and number.isdecimal() and len(number) < 9 else 0
        if not name or not count:
            raise UsageError(
                f"--devices: {part.strip()!r:.60} has no name and number: expected a kind, x and how many ranks have "
                "one, at least 1, such as h100-80x4,l40s-48x4"
            )
        if name == "cpu":
            raise UsageError(
                "--devices: cpu is no kind in a mixture, because no table has a host's memory and speed: plan ranks on "
                f"hosts with --gpus {count} --device cpu"
            )
        device = device_named(name)
        devices[device.name] = device
        if world + count > _MOST_RANKS:
            raise UsageError(f"--devices: {text!r:.60} names more than {_MOST_RANKS:,} ranks")
        ranks.setdefault(device.name, []).extend(range(world, world + count))
        world += count
    return tuple(Kind(device, tuple(ranks[name])) for name, device in devices.items())


def world_of(kinds: Sequence[Kind]) -> int:
    """The number of ranks."""
    return sum(len(kind.ranks) for kind in kinds)


def by_rank(kinds: Sequence[Kind]) -> tuple[int, ...]:
    """The number of each rank's kind."""
    found = {rank: number for number, kind in enumerate(kinds) for rank in kind.ranks}
    return tuple(found[rank] for rank in range(len(found)))


def stand_in(kinds: Sequence[Kind]) -> Device:
    """What stands for all devices where one is asked for: the slowest link, the smallest memory, and mean peaks."""
    world, devices = world_of(kinds), [kind.device for kind in kinds]
    name = ",".join(f"{kinds[number]}x{len(list(run))}" for number, run in groupby(by_rank(kinds)))
    dtypes = [dtype for dtype in devices[0].flops if all(dtype in device.flops for device in devices)]
    links = [device.inner for device in devices if device.inner is not None]
    inner = None
    if len(links) == len(devices):
        inner = Link(max(link.latency_s for link in links), min(link.bytes_per_s for link in links))
    return Device(
        name,
        {
            dtype: sum(len(kind.ranks) * kind.device.flops[dtype] for kind in kinds) / world
            for dtype in dtypes
        },
        min(device.memory_bytes for device in devices),
        min(device.memory_bytes_per_s for device in devices),
        inner,
    )


def lies_alike(kinds: Sequence[Kind], mesh: Mesh) -> bool:
    """Whether all groups of the outer axis have the same kinds in the same order, so that shares can lie along the
    inner one: its pieces are held by ranks of all groups.
    """
    numbers = by_rank(kinds)
    return numbers == numbers[: mesh.inner] * mesh.outer


def shares_of(spare: Sequence[float]) -> tuple[int, ...]:
    """Shares of kinds with so many bytes to spare for sharded state; equal ones where none has any."""
    most = max(spare)
    if most <= 0:
        return (1,) * len(spare)
    return tuple(round(LARGEST_SHARE * max(each, 0.0) / most) for each in spare)


def paces_of(speeds: Sequence[float]) -> tuple[float, ...]:
    """Speeds relative to the slowest, in two digits."""
    slowest = min(speeds)
    return tuple(float(f"{speed / slowest:.2g}") for speed in speeds)


@cache
def deal(samples: int, pace: tuple[float, ...]) -> tuple[int, ...]:
    """How many of so many samples of equal cost `Batches(pace=…)` gives each rank at a time."""
    costs = np.ones(samples)
    return tuple(len(micro_batch) for (micro_batch,) in share_out(costs, costs, pace, 1))
