"""The update of units whose masters and states visit the device: the next unit comes while the last one leaves.

There are two buffers, so unit n+1 comes when unit n-1 has left, and at the earliest when unit n is updated. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Mapping

from zerokit.planning.clock import Clock, Event
from zerokit.planning.hardware import Way


class Tour:
    """Units in turn, with the bytes that each one brings; to be told when a unit `arrives` and when it `leaves`."""

    def __init__(self, clock: Clock, way: Way, home: str, sizes: Mapping[int, int]) -> None:
        self._clock, self._way, self._home = clock, way, home
        self._units = list(sizes.items())
        self._free = dict.fromkeys(("come", "leave"), clock.now)
        self._arrived: list[float] = []
        self._left: list[float] = []
        self.waited = 0.0
        """Seconds in which the update waited for states."""
        self._bring(0)

    def arrive(self, number: int) -> None:
        """Wait until the states of this unit are here."""
        self._wait(self._arrived[number])
        self._bring(number + 1)

    def leave(self, number: int) -> None:
        """Let the states of this unit leave."""
        index, nbytes = self._units[number]
        self._left.append(self._move("leave", index, nbytes / self._way.leave, self._clock.now))

    def finish(self) -> None:
        """Wait until all have left."""
        if self._left:
            self._wait(self._left[-1])

    def _bring(self, number: int) -> None:
        if number < len(self._units):
            index, nbytes = self._units[number]
            room = self._left[number - 2] if number > 1 else 0.0
            start = max(self._clock.now, room)
            self._arrived.append(self._move("come", index, nbytes / self._way.come, start))

    def _move(self, lane: str, unit: int, seconds: float, ready: float) -> float:
        start = max(ready, self._free[lane])
        for each in self._free if self._way.in_turn else [lane]:
            self._free[each] = start + seconds
        if seconds:
            self._clock.events.append(Event(self._home, f"{lane} {unit}", start, start + seconds))
        return start + seconds

    def _wait(self, until: float) -> None:
        if until > self._clock.now:
            self.waited += until - self._clock.now
            self._clock.now = until
