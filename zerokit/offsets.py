"""The offsets between the ranks' clocks, measured over the process group.

    rank 0   begins ── barrier ──────────────── barrier ── ends       offset = reading − (begin + end) / 2
    rank r             barrier ── its reading ── barrier              uncertain by (end − begin) / 2

The fastest round of some counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Offset:
    """A rank's clock offset from rank 0, in seconds, and its error bound."""

    seconds: float
    uncertainty_s: float


def measure_offsets(
    group: dist.ProcessGroup, now: Callable[[], float] = time.time, rounds: int = ROUNDS
) -> list[Offset]:
    """Compare the clocks of all ranks of a gloo `group`, which call it; `now` reads this one's."""
    import torch.distributed as dist

    mine = []
    for _ in range(rounds):
        begun = now()
        dist.barrier(group)
        read = now()
        dist.barrier(group)
        mine.append((begun, read, now()))
    everyone = [mine] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    fastest = min(range(rounds), key=lambda one: everyone[0][one][2] - everyone[0][one][0])
    begun, _, ended = everyone[0][fastest]
    return [Offset(one[fastest][1] - (begun + ended) / 2, (ended - begun) / 2) for one in everyone]


def by_machine(offsets: Sequence[Offset], machines: Sequence[str]) -> list[Offset]:
    """The offsets of clocks that all processes of one machine share, as Linux' monotonic clock: one a machine.

    Rank 0's machine has none, without doubt. A rank whose own offset contradicts its machine's, as in a time namespace,
    keeps it.
    """
    shared = {machines[0]: Offset(0.0, 0.0)}
    for offset, machine in sorted(zip(offsets, machines, strict=True), key=lambda one: one[0].uncertainty_s):
        shared.setdefault(machine, offset)
    return [
        shared[machine] if agree(shared[machine], offset) else offset
        for offset, machine in zip(offsets, machines, strict=True)
    ]


def agree(one: Offset, other: Offset) -> bool:
    """Whether two measurements can be of one offset."""
    return abs(one.seconds - other.seconds) <= one.uncertainty_s + other.uncertainty_s
