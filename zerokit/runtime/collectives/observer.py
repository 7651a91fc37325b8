"""The seam for timelines: an `Observer` learns of a rank's collectives and waits as they happen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from zerokit.runtime.collectives.legs import Count
from zerokit.runtime.collectives.route import Kind


class Flight(Protocol):
    """A collective over one axis.

    On a device its methods are called with the stream on which the collective runs as the current one.
    """

    def begin(self) -> None:
        """The work starts."""

    def end(self) -> None:
        """Its result is there. Only the first call counts."""


class Observer(Protocol):
    """What watches the collectives of one rank."""

    def flies(self, kind: Kind, unit: int, counts: Sequence[Count]) -> Flight:
        """A collective on a unit is about to start over one axis; `counts` are what the traffic counts of it."""

    def waits(self, what: str) -> Callable[[], None]:
        """The host waits for `what`, until it calls what this returns."""

    def around(self, wait: Callable[[], None]) -> None:
        """Call `wait`, which makes a device's computation wait."""

    def taken(self) -> None:
        """A step's traffic is complete: collectives from here on are counted in the next."""
