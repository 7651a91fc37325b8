"""Notes the spans of one step on one rank: what collectives tell, phases of the step, the update.

A step's traffic begins where the last one's was taken: at stages 1 and 2 with gathers of what the last step has
updated. So collectives are noted from the step before on, and those that the traced step counts are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from zerokit.bench.trace.spans import (
    COMPUTE,
    GATHERS,
    OWNERS,
    REDUCTIONS,
    STEP,
    UPDATE,
    WAITS,
    Marks,
    Span,
    Stretch,
)
from zerokit.runtime.collectives import Kind
from zerokit.runtime.collectives.legs import Count

_OPERATIONS = {
    Kind.ALL_GATHER: (GATHERS, "gather"),
    Kind.REDUCE_SCATTER: (REDUCTIONS, "reduce"),
    Kind.TO_OWNERS: (OWNERS, "to owners of"),
    Kind.FROM_OWNERS: (OWNERS, "from owners of"),
    Kind.RECUT: (OWNERS, "recut"),
}


class Recorder:
    """Notes a step: collectives and waits as an `Observer`, modules' passes and the update by methods of its own.

    `host`, `compute` and `flights` mark times on the host, in the model's computation and in collectives; `units` are
    the units' names.
    """

    def __init__(self, units: Sequence[str], host: Marks, compute: Marks, flights: Marks) -> None:
        self._units, self._host, self._compute, self._of_flights = units, host, compute, flights
        self._steps: list[list[Stretch]] = [[]]
        """Collectives, by the step that counts them."""
        self._stretches: list[Stretch] = []
        self._phase: Stretch | None = None
        self._update: Stretch | None = None
        self._backward: Stretch | None = None

    # ---- as an observer

    def flies(self, kind: Kind, unit: int, counts: Sequence[Count]) -> Stretch:
        moved = {count.name: count.moved.bytes for count in counts}
        axes = [axis for axis in (name.partition("/")[2] for name in moved) if axis]
        # At stage 0 a reduction also gathers its sums: as the traffic has it, by operation.
        gathers = any(name.startswith("all_gather") for name in moved)
        track, verb = _OPERATIONS[Kind.ALL_GATHER if gathers else kind]
        flight = Stretch(
            self._of_flights,
            track,
            f"{verb} {self._units[unit]}",
            unit=unit,
            bytes=sum(moved.values()),
            operations=moved,
            received_bytes=sum(count.received for count in counts),
            **({"axis": " and ".join(axes)} if axes else {}),
        )
        self._steps[-1].append(flight)
        return flight

    def waits(self, what: str) -> Callable[[], None]:
        return self._begin(Stretch(self._host, WAITS, f"wait for {what}")).end

    def around(self, wait: Callable[[], None]) -> None:
        ends = self._begin(Stretch(self._compute, WAITS, "wait of the device")).end
        wait()
        ends()

    def taken(self) -> None:
        self._steps.append([])
        if self._update is not None:
            self._update.end()

    # ---- the rest of a step

    @contextmanager
    def step(self) -> Iterator[None]:
        """The traced step: what came before is forgotten, but for collectives that it counts."""
        self._steps, self._stretches = self._steps[-1:], []
        yield
        self.end_backward()
        if self._phase is not None:
            self._phase.end()

    def phase(self, part: str) -> None:
        """A part of the step begins: "forward", "backward", "optimizer"."""
        self.end_backward()
        if self._phase is not None:
            self._phase.end()
        self._phase = self._begin(Stretch(self._compute, STEP, part))

    def update(self, *_: object) -> None:
        """The optimizer's update begins; it ends where the step's traffic is taken."""
        self._update = self._begin(Stretch(self._compute, UPDATE, "update"))

    def begin_module(self, path: str, units: Sequence[int], *, again: bool) -> Stretch:
        """A module of these units begins its forward, or computes it `again` in backward."""
        name = "recompute" if again else "forward"
        return self._begin(Stretch(self._compute, COMPUTE, f"{name} {path}", **self._about(units, again)))

    def come_to(self, path: str, units: Sequence[int]) -> None:
        """Backward comes to a module: the gradient of its output is there."""
        self.end_backward()
        self._backward = self._begin(
            Stretch(self._compute, COMPUTE, f"backward {path}", **self._about(units, again=False))
        )

    def end_backward(self) -> None:
        """Backward has left the module that it came to last."""
        if self._backward is not None:
            self._backward.end()
            self._backward = None

    def _about(self, units: Sequence[int], again: bool) -> dict[str, object]:
        names = {"units": [self._units[unit] for unit in units]}
        return {**names, "recomputed": True} if again else {**names}

    def _begin(self, stretch: Stretch) -> Stretch:
        stretch.begin()
        self._stretches.append(stretch)
        return stretch

    def spans(self) -> list[Span]:
        """The spans of the traced step, once the device is done."""
        flights = self._steps[0] if len(self._steps) > 1 else []
        end = max((one.over(0.0).stop for one in self._stretches), default=0.0)
        return [one.over(end) for one in (*self._stretches, *flights)]
