"""`Pace`: how fast each rank computes, measured while training, so that ranks get samples in proportion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from zerokit.errors import UsageError
from zerokit.runtime.optimizer import ZeroOptimizer
from zerokit.training.computing import ComputeClock, compute_clock

Speeds = tuple[float, ...]


class Pace:
    """Measures the speed of each rank, for `Batches(pace=…)`, which gives ranks samples in proportion to it.

        pace = zerokit.Pace(optimizer, every=20)
        batches = zerokit.Batches(lengths, samples=256, pace=pace)

    A rank's speed is the cost of its samples divided by the time that it computed, from the beginning of a step of
    `batches.steps(loader)` to the end of `optimizer.step()`, without what it waits for in zerokit's collectives. Every
    `every` steps the ranks exchange their medians in one small message. They agree on new speeds where these make a
    step shorter by more than `margin`, and use them from the first step that no rank's loader has fetched yet.

    What has been agreed is part of `batches.state_dict()`, so a run that is resumed on as many ranks goes on with it.

    Args:
        optimizer: whose steps are measured, and whose ranks get samples.
        every: steps between two agreements.
        margin: the least part of a step that other speeds must save.

    Raises `UsageError` for arguments that do not fit, and for an optimizer whose ranks train as islands.
    """

    def __init__(self, optimizer: ZeroOptimizer, *, every: int = 20, margin: float = 0.05) -> None:
        if type(every) is not int or every < 1:
            raise UsageError(f"every={every!r}: expected a number of steps, at least 1")
        if not 0 <= margin < 1:
            raise UsageError(f"margin={margin!r}: expected a part of a step, from 0 to below 1")
        if optimizer.islands is not None:
            raise UsageError(
                "Pace: islands take the mean of their weights, each for as much as any other, so they should train on "
                "equally many samples: give Pace an optimizer without islands"
            )
        self.every, self.margin = every, margin
        self._collectives = optimizer.runtime.collectives
        self.rank, self.world = self._collectives.rank, self._collectives.world
        self._clock: ComputeClock = compute_clock(self._collectives)
        self._costs: list[float] = []
        """What this rank's samples cost in each step since the last agreement, and of the one that has begun."""
        self._measured = 0
        """How many of these steps have been measured."""
        self._planned = 0
        """The first step that this rank's batches have not planned yet."""
        self._agreed: list[tuple[int, Speeds]] = [(0, (1.0,) * self.world)]
        """From which step on which speeds hold, in order."""
        optimizer.register_step_post_hook(self._after_step)

    @property
    def speeds(self) -> Speeds:
        """The last speeds on which all ranks have agreed, relative to their mean."""
        return self._agreed[-1][1]

    # ---- for Batches

    def plan(self, step: int) -> Speeds:
        """The speeds that hold in a step, which is planned with them."""
        self._planned = step + 1
        return next(speeds for begin, speeds in reversed(self._agreed) if begin <= step)

    def begin(self) -> None:
        """A step begins on this rank."""
        self._clock.begin()

    def note(self, cost: float) -> None:
        """What the samples of the step that has begun cost on this rank."""
        del self._costs[self._measured :]
        self._costs.append(cost)

    def state(self, step: int) -> list[Any]:
        """What holds from a step on, as plain data."""
        first = max(at for at, (begin, _) in enumerate(self._agreed) if begin <= step)
        return [[begin, list(speeds)] for begin, speeds in self._agreed[first:]]

    def load(self, saved: Sequence[Any]) -> None:
        """Go on with what has been saved; where another number of ranks saved it, with equal speeds."""
        agreed = [(int(begin), tuple(map(float, speeds))) for begin, speeds in saved]
        fits = agreed and all(len(speeds) == self.world for _, speeds in agreed)
        self._agreed = agreed if fits else [(0, (1.0,) * self.world)]
        self._planned = 0
        self._clock.read()
        self._costs.clear()
        self._measured = 0

    # ---- agreement

    def _after_step(self, *_: object) -> None:
        if not self._clock.end():
            return
        self._measured += 1
        if self._measured < self.every:
            return
        seconds, costs = self._clock.read(), self._costs
        self._costs, self._measured = [], 0
        pairs = [(cost, each) for cost, each in zip(costs, seconds, strict=True) if cost > 0 and each > 0]
        own = 1.0 / median(each / cost for cost, each in pairs) if pairs else 0.0
        found = self._collectives.all_gather_objects((own, self._planned), "Pace")
        speeds = better(self.speeds, [speed for speed, _ in found], self.margin)
        if speeds is not None:
            begin = max(planned for _, planned in found)
            self._agreed = [*(each for each in self._agreed if each[0] < begin), (begin, speeds)]


def better(current: Speeds, measured: Sequence[float], margin: float) -> Speeds | None:
    """The measured speeds relative to their mean, where a step with samples in proportion to them takes less than one
    with the current speeds by more than `margin` of it; else None. A rank that has measured nothing (0) tells nothing.
    """
    if not all(0 < speed < math.inf for speed in measured):
        return None
    # The time of a step of cost 1 on the rank that takes longest, and where all take as long.
    now = max(part / speed for part, speed in zip(current, measured, strict=True)) / sum(current)
    if now * (1 - margin) <= 1 / sum(measured):
        return None
    mean = sum(measured) / len(measured)
    return tuple(float(f"{speed / mean:.3g}") for speed in measured)
