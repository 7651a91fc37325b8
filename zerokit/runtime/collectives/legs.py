"""The ways of a collective over the axes of the mesh, and what is counted of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerokit.formulas import Operation, TrafficReport
from zerokit.runtime.collectives.route import Hop


class Count:
    """How often a collective was started since the traffic was taken, and what it moves each time."""

    __slots__ = ("calls", "moved", "name", "received")

    def __init__(self, name: str, moved: Operation, received: int) -> None:
        self.name, self.moved, self.received, self.calls = name, moved, received, 0

    def start(self) -> None:
        self.calls += 1

    def take(self, report: TrafficReport) -> None:
        """Move the count to a report."""
        calls, self.calls = self.calls, 0
        if calls:
            moved = self.moved
            total = Operation(calls * moved.calls, calls * moved.elements, calls * moved.bytes)
            report.count(self.name, total, calls * self.received)


@dataclass(frozen=True, slots=True)
class Leg:
    """A collective's way over one axis: its hop, None where nothing of the unit is to move here, and its counts."""

    hop: Hop | None
    counts: Sequence[Count]
