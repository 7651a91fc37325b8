"""Collectives on hosts in flight: their order, and how a waiting rank continues to serve the others.

[Note: nobody waits for itself] A rank that waits must go on with whatever others may wait for: pieces that it has not
read yet, and second hops whose first ones have arrived. That is `Progress.pending`, and every wait attempts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from zerokit.patience import Patience
from zerokit.runtime.collectives.route import Hop, Kind
from zerokit.runtime.collectives.stalls import StallReporter

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3


class HostHop:
    """One hop in flight: a collective over one axis."""

    name: str
    attended = False
    """Whether it arrives only where `attempt` is called, so that others wait for this rank."""

    def attempt(self) -> bool:
        """Make progress without waiting. Returns whether the result has arrived."""
        raise NotImplementedError

    def released(self) -> bool:
        """Whether no other rank still reads this rank's memory for it, once the result has arrived."""
        return True

    def pause(self, seconds: float) -> None:
        """Return after so many seconds, or sooner where something may have arrived."""
        time.sleep(seconds)

    def arrive(self) -> None:
        """Wait for the result where this rank has nothing else to go on with; may return before."""

    def require_alive(self) -> None:
        """Raise `RuntimeError` if it cannot arrive because a rank has ended. By default the route notices."""


class Progress:
    """The collectives on which this rank must make progress while it waits; see [Note: nobody waits for itself]."""

    def __init__(self, timeout_s: float, reporter: StallReporter) -> None:
        self.pending: list[HostWork] = []
        self.timeout_s, self.reporter = timeout_s, reporter

    def wait_at_most(self, seconds: float) -> None:
        self.timeout_s = min(self.timeout_s, seconds)

    def attempt_all(self) -> None:
        for work in list(self.pending):
            work.attempt()

    def until(self, condition: Callable[[], bool], hop: HostHop) -> None:
        """Wait for `condition`, which `hop` brings about, and meanwhile go on with all that is pending.

        Raises `RuntimeError` after the time-out, or where a rank that must still act has ended.
        """
        patience, pause = Patience(self.timeout_s), _FIRST_PAUSE_S
        while not condition():
            self.attempt_all()
            if pause >= _LONGEST_PAUSE_S:
                try:
                    hop.require_alive()
                except RuntimeError:
                    if condition():  # it did its part and left
                        return
                    raise
            if patience.over:
                raise RuntimeError(f"timed out after {self.timeout_s:g} s")
            hop.pause(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)


class HostWork(HostHop):
    """A collective on hosts: a chain of hops, each of which starts when the previous one has its result."""

    def __init__(self, progress: Progress, kind: Kind, hops: Sequence[Hop]) -> None:
        self._progress, self._reporter, self.kind = progress, progress.reporter, kind
        self._started: list[HostHop] = [hops[0](None)]
        self._next = list(hops[1:])
        if self._next or self._hop.attended:
            progress.pending.append(self)

    @property
    def _hop(self) -> HostHop:
        return self._started[-1]

    def attempt(self) -> bool:
        while self._hop.attempt():
            if not self._next:
                if self in self._progress.pending:
                    self._progress.pending.remove(self)
                return True
            self._started.append(self._next.pop(0)(None))
        return False

    def finish(self) -> None:
        """Wait for the result; others may still read this rank's memory."""
        with self._reporter.waiting(lambda: self._hop.name):
            if not self._progress.pending:
                self._hop.arrive()
            self._progress.until(self.attempt, self)

    def require_alive(self) -> None:
        self._hop.require_alive()

    def pause(self, seconds: float) -> None:
        self._hop.pause(seconds)

    def wait(self) -> None:
        self.finish()
        for hop in self._started:
            if not hop.released():
                with self._reporter.waiting(hop.name):
                    self._progress.until(hop.released, hop)
