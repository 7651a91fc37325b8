"""Where masters and the optimizer's states are between steps: on the device, or elsewhere, from where they visit it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from zerokit.errors import StorageError, UsageError, ZerokitWarning
from zerokit.files import path_of
from zerokit.runtime.admission import BUILDING
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.homes.codes import Codes, decode
from zerokit.runtime.homes.copies import CopyStream
from zerokit.runtime.homes.disk import DiskHome
from zerokit.runtime.homes.elsewhere import PAGE
from zerokit.runtime.homes.fp8 import CodedHome, encoded, require_codable
from zerokit.runtime.homes.home import Elements, Home, Stored, in_memory
from zerokit.runtime.homes.pinned import PinnedHome
from zerokit.runtime.homes.staging import Staging

__all__ = [
    "Codes",
    "Elements",
    "Home",
    "Stored",
    "decode",
    "encoded",
    "home_of",
    "in_memory",
    "kind_of",
    "require_codable",
    "reserve",
    "room_of",
]

T = TypeVar("T")
KINDS = ("device", "host", "fp8")


def kind_of(states: object) -> str:
    """The kind of home that `states` names. Raises `UsageError` for what names none."""
    if isinstance(states, str) and states in KINDS:
        return states
    if isinstance(states, str | os.PathLike) and os.fspath(states):
        return "disk"
    raise UsageError(
        f"states={states!r}: expected {', '.join(map(repr, KINDS))}, or the path of a directory on a disk of this node"
    )


def home_of(states: str | os.PathLike[str], rooms: Mapping[int, int], collectives: Collectives) -> Home:
    """The home that `states` names, with so many bytes of room for each unit, by index. Collective.

    Raises `UsageError` on all ranks where one of them has no room.
    """
    kind = kind_of(states)
    if kind == "device":
        return Home()
    if kind == "fp8":
        return CodedHome(collectives.device)
    streams = streams_for(collectives.device)
    if kind == "disk":
        staging = Staging(streams[0]) if streams else None
        return _on_all(lambda: DiskHome(path_of(states), rooms, staging), collectives, BUILDING)
    if streams:
        come, leave = streams
        return _on_all(lambda: PinnedHome(rooms, come, leave), collectives, BUILDING)
    if collectives.rank == 0:
        warnings.warn(
            "states='host' changes nothing here: the model computes on the host, where its states are anyway",
            ZerokitWarning,
            stacklevel=2,
        )
    return Home()


def streams_for(device: torch.device) -> tuple[CopyStream, CopyStream] | None:
    """Streams for copies to a device and from it; none where it computes on the host."""
    return (CopyStream(device), CopyStream(device)) if device.type == "cuda" else None


def reserve(home: Home, sizes: Sequence[int], collectives: Collectives, place: str) -> None:
    """Make sure of room for more tensors of these sizes, in the call that `place` names. Collective.

    Raises `UsageError` on all ranks where one of them has no room.
    """
    if home.name != "device":
        _on_all(lambda: home.reserve(room_of(sizes)), collectives, place)


def _on_all(make: Callable[[], T], collectives: Collectives, place: str) -> T:
    """What `make` gives on this rank. Raises `UsageError` on all ranks where it fails on one."""
    made: list[T] = []
    problem = ""
    try:
        made.append(make())
    except (UsageError, StorageError) as error:
        problem = str(error)
    problems = collectives.all_gather_objects(problem, place)
    if failed := [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]:
        raise UsageError("; ".join(failed))
    return made[0]


def room_of(sizes: Sequence[int]) -> int:
    """Bytes of a store for tensors of these sizes, or at most for some that together have one of them."""
    return sum(-(-size // PAGE) * PAGE + PAGE for size in sizes)
