"""The torch optimizers inside: one class, or several as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from zerokit.runtime.trials import OptimizerStates


class Several(Optimizer):
    """Optimizers of different classes as one: their groups one behind the other, and one mapping of states."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        first, *others = [part.defaults for part in parts]
        shared = {name: value for name, value in first.items() if all(name in other for other in others)}
        super().__init__([group for part in parts for group in part.param_groups], shared)
        self.parts = list(parts)
        self.hand_out()

    def hand_out(self) -> None:
        """Let each optimizer have its groups, and all of them the states, as they are here now."""
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            vars(part).update(param_groups=self.param_groups[first:last], state=self.state)
            first = last

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.hand_out()
        for part in self.parts:
            part.__setstate__({"state": part.state, "param_groups": part.param_groups})

    def __getattr__(self, name: str) -> Callable[[], None]:
        """`train` and `eval`, where some of them have these: schedule-free optimizers."""
        own = [getattr(part, name, None) for part in self.__dict__.get("parts", ())]
        found = [method for method in own if callable(method)]
        if name not in ("train", "eval") or not found:
            raise AttributeError(name)

        def switch() -> None:
            self.hand_out()
            for method in found:
                method()

        return switch

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One class's optimizer, the numbers of its groups, and what the trial of each has shown."""

    optimizer: Optimizer
    groups: range
    states: Sequence[OptimizerStates]

    @property
    def whole(self) -> bool:
        """Whether it updates whole tensors, at least those of some groups."""
        return any(states.whole is not None for states in self.states)


def parts_of(inner: Optimizer) -> Sequence[Optimizer]:
    """The optimizers of single classes, current, which `inner` is or joins."""
    if not isinstance(inner, Several):
        return [inner]
    inner.hand_out()
    return inner.parts
