"""The clock of a planned step: lanes of one rank, collectives in flight, and what the rank waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from zerokit.placement import Axis
from zerokit.planning.hops import Hop


@dataclass(frozen=True, slots=True)
class Event:
    """A stretch of time on one lane of a rank.

    Lanes are "compute", "inner" and "outer" (the axes' collectives), "host" and "disk" (states that visit).
    """

    lane: str
    name: str
    start_s: float
    stop_s: float


Flown: TypeAlias = tuple[Hop, float, float]


class Clock:
    """Lanes of one rank: when each is free, what has happened on it, and what the rank has waited for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free: dict[str, float] = {}
        self.flights: list[tuple[float, float, float]] = []
        """Collectives in flight or to come: start, stop and the share of the device that they take."""
        self.events: list[Event] = []
        self.exposed = dict.fromkeys(Axis, 0.0)
        self.slowed = 0.0
        self.busy: dict[str, float] = {}

    def run(self, seconds: float, name: str) -> None:
        """Add computation; collectives in flight slow it down."""
        start, left, now = self.now, seconds, self.now
        self.flights = [flight for flight in self.flights if flight[1] > now]
        while left > 0:
            share = max((flight[2] for flight in self.flights if flight[0] <= now < flight[1]), default=0.0)
            edges = [edge for flight in self.flights for edge in flight[:2] if edge > now]
            until = min(edges, default=float("inf"))
            done = min(left, (until - now) * (1 - share))
            now = until if done < left else now + done / (1 - share)
            left -= done
        self.slowed += now - start - seconds
        self.now = now
        if seconds:
            self.events.append(Event("compute", name, start, now))

    def fly(self, hops: Sequence[Hop], name: str) -> list[Flown]:
        """Issue a chain of hops, each after the one before; returns their starts and stops."""
        flown: list[Flown] = []
        ready = self.now
        for hop in hops:
            start = max(ready, self.free.get(hop.link, 0.0))
            ready = start + hop.link_s
            if hop.link_s:
                self.free[hop.link] = ready
                self.flights.append((start, ready, hop.share))
                self.events.append(Event(hop.axis.name.lower(), name, start, ready))
                self.busy[hop.axis.name.lower()] = self.busy.get(hop.axis.name.lower(), 0.0) + hop.link_s
            flown.append((hop, start, ready))
        return flown

    def wait(self, flown: Sequence[Flown], name: str) -> None:
        """Wait until these hops have arrived, and add the time of their copies."""
        for hop, _, stop in flown:
            if stop > self.now:
                self.exposed[hop.axis] += stop - self.now
                self.now = stop
            if hop.copy_s:
                self.events.append(Event("compute", name, self.now, self.now + hop.copy_s))
                self.exposed[hop.axis] += hop.copy_s
                self.now += hop.copy_s
