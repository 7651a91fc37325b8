"""`train()` and `eval()` of optimizers that evaluate the model with other weights, as schedule-free ones do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from zerokit.runtime.build import Runtime
from zerokit.runtime.inner import parts_of
from zerokit.runtime.turns import Turns
from zerokit.runtime.unit import UnitState


class Modes:
    """The optimizer's own methods `train` and `eval`, whose changes of the masters reach the model."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def method(self, name: str) -> Callable[[], None]:
        """The collective form of the inner optimizer's method. Raises `AttributeError` where it has none."""
        if not callable(getattr(self._runtime.inner, name, None)):
            raise AttributeError(f"{type(self._runtime.inner).__name__} has no {name}()")
        return partial(self._switch, name)

    def _switch(self, name: str) -> None:
        runtime, before = self._runtime, self._flags()
        runtime.settle()
        trainable = [unit for unit in runtime.units if unit.unit.trainable]
        for unit in trainable:
            unit.unguard_masters()
        turns = [Turns(part) for part in parts_of(runtime.inner) if callable(getattr(part, name, None))]

        def switch(present: Sequence[UnitState]) -> None:
            tensors = {master.tensor for unit in present for master in unit.masters}
            for turn in turns:
                turn.call(name, tensors)

        try:
            runtime.home.tour(trainable, switch, writes=True, agree=runtime.control.require_all_well)
        finally:
            for unit in trainable:
                unit.guard_masters()
        if self._flags() != before:  # trainers call it before every pass
            runtime.publish()

    def _flags(self) -> list[bool]:
        """What tells the optimizer's mode, alike on all ranks: switches among its attributes and groups' options."""
        inner = self._runtime.inner
        return [
            value
            for options in (vars(inner), *inner.param_groups)
            for value in options.values()
            if type(value) is bool
        ]
