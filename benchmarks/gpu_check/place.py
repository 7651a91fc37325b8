"""Where a part of the check runs, and what a part is."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """The device of a part's process, which has no process group yet; on a host sizes are `small`.

    Attributes:
        device: `cuda:0`, or `cpu` where a host tries the part.
        small: whether the sizes are those of a test: the part has to end within seconds.
        out: a folder for traces, which are packed once the part has ended.
        limit_s: after so many seconds from the start the part's processes are killed.
        started: when that was, by `time.monotonic`.
    """

    device: torch.device
    small: bool
    out: Path
    limit_s: float = math.inf
    started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until the part's processes are killed."""
        return self.started + self.limit_s - time.monotonic()


SPARE_S = 8.0
"""The seconds that a part keeps for its last attempt."""

Part = Callable[[Place], dict[str, Any]]
"""Returns what it found as JSON's values; raises where something is wrong.

The text at "row" of what is returned stands in the table that ends the output.
"""


class CheckFailed(Exception):
    """Results are wrong: each fault in a line, and beside them what was found."""

    def __init__(self, faults: Sequence[str], data: dict[str, Any]) -> None:
        super().__init__("\n".join(faults))
        self.data = data


def found(data: dict[str, Any], faults: Sequence[str]) -> dict[str, Any]:
    """Returns the data of a part without faults, and raises `CheckFailed` otherwise."""
    if faults:
        raise CheckFailed(faults, data)
    return data


def attempt(name: str, call: Callable[[], T], faults: list[str], place: Place | None = None) -> T | None:
    """What the call returns; where it raises, a fault, so that the rest of a part is tried all the same.

    So it is where the time of `place` is nearly over: a part that is killed would lose what it has found.
    """
    if place is not None and place.left_s < SPARE_S:
        faults.append(f"{name}: not tried, as the part's time was nearly over")
        return None
    try:
        return call()
    except Exception as error:
        traceback.print_exc()
        faults.append(f"{name}: {type(error).__name__}: {error}")
        return None
