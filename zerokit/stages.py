"""The stages of ZeRO (arXiv:1910.02054, §5): what is divided among ranks, and what follows from it."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, TypeAlias

from zerokit.errors import UsageError
from zerokit.layout import Interval, Unit


class Stage(IntEnum):
    """A stage, named after what it divides beyond the one before it."""

    NOTHING = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3

    @classmethod
    def of(cls, number: int) -> Stage:
        """The stage of this number. Raises `UsageError` for another one."""
        if number not in (0, 1, 2, 3):
            raise UsageError(
                f"stage {number!r} is unknown: 0 divides nothing, 1 optimizer states, 2 also gradients, "
                "3 also parameters"
            )
        return cls(number)

    @property
    def divides_optimizer(self) -> bool:
        return self >= Stage.OPTIMIZER

    @property
    def divides_gradients(self) -> bool:
        return self >= Stage.GRADIENTS

    @property
    def divides_parameters(self) -> bool:
        return self >= Stage.PARAMETERS

    @property
    def gathers_gradients(self) -> bool:
        """Whether summed gradients go back to every rank, because every rank updates everything."""
        return not self.divides_optimizer

    @property
    def gathers_updates(self) -> bool:
        """Whether parameters are whole everywhere but updated by their owners, who pass them on after each step."""
        return self.divides_optimizer and not self.divides_parameters

    @property
    def pooled_buckets(self) -> int:
        """Gradient buckets that small units share: one is filled while others, at stage 3 one other, are on their way.

        None where every unit keeps a whole bucket of its own.
        """
        return {Stage.GRADIENTS: 3, Stage.PARAMETERS: 2}.get(self, 0)

    def kept_parameters(self, unit: Unit, rank: int) -> Interval:
        """The elements of `unit` that `rank` holds between steps."""
        return _share(unit, rank, divided=self.divides_parameters)

    def kept_gradients(self, unit: Unit, rank: int) -> Interval:
        """The elements whose gradients `rank` holds between backward and step."""
        return _share(unit, rank, divided=self.divides_gradients)

    def updated(self, unit: Unit, rank: int) -> Interval:
        """The elements that `rank`'s optimizer updates: it holds their masters and states."""
        return _share(unit, rank, divided=self.divides_optimizer)


StageNumber: TypeAlias = Literal[0, 1, 2, 3] | Stage
"""What arguments called `stage` take; `Stage.of(number)` makes one of any number."""


def _share(unit: Unit, rank: int, *, divided: bool) -> Interval:
    return unit.shard(rank) if divided else Interval(0, unit.numel)
