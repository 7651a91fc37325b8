"""The kinds of state that a live optimizer keeps for each parameter, by a trial: those a checkpoint should have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature

from zerokit.errors import UnsupportedOptimizer
from zerokit.owners import Whole
from zerokit.runtime.build import Runtime
from zerokit.runtime.inner import Part
from zerokit.runtime.trials import probe

KERNEL_OPTIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""How an optimizer computes is the running program's business, not the checkpoint's."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The states that the class `name` keeps for a parameter: at `least` these, and at `most` these.

    Of a tensor that is updated whole, states of other shapes depend on its size, so they may be missing.
    """

    name: str
    group: int
    least: frozenset[str]
    most: frozenset[str]
    tensors: tuple[Whole, ...] = ()
    """The tensors of a parameter that is updated whole."""

    def fits(self, kinds: set[str]) -> bool:
        return self.least <= kinds <= self.most


def expected_kinds(runtime: Runtime) -> dict[str, Expected]:
    """By the name of each trainable parameter that has elements."""
    of_group: dict[int, Expected] = {}
    wholes: dict[tuple[int, int], list[Whole]] = {}
    for index in runtime.owners.units:
        for tensor in runtime.owners.of_unit(index):
            wholes.setdefault((index, tensor.position), []).append(tensor)
    found = {}
    for unit in runtime.layout.units:
        for position, parameter in enumerate(unit.parameters if unit.trainable else ()):
            if own := wholes.get((unit.index, position)):
                found[parameter.name] = _of_tensors(runtime, tuple(own))
            elif parameter.numel:
                number = parameter.group
                if number not in of_group:
                    of_group[number] = _of_group(runtime, number)
                found[parameter.name] = of_group[number]
    return found


def _of_tensors(runtime: Runtime, tensors: tuple[Whole, ...]) -> Expected:
    number = tensors[0].group
    states = runtime.states[number].whole
    assert states is not None
    shapes = {tensor.shape for tensor in tensors}
    kinds = [states.kinds(shape) for shape in shapes]
    least = frozenset.intersection(*(alike for alike, _ in kinds))
    most = frozenset.union(*(every for _, every in kinds))
    return Expected(type(_part(runtime, number).optimizer).__name__, number, least, most, tensors)


def _of_group(runtime: Runtime, number: int) -> Expected:
    """With the options that the group has now."""
    inner, group = _part(runtime, number).optimizer, runtime.inner.param_groups[number]
    accepted = signature(type(inner)).parameters.values()  # AdamW has a default that it does not take
    names = {p.name for p in accepted} if all(p.kind != p.VAR_KEYWORD for p in accepted) else group.keys()
    options = {key: group[key] for key in names & inner.defaults.keys() - KERNEL_OPTIONS}
    own = {
        key: value
        for key, value in group.items()
        if isinstance(value, bool | str) and key not in inner.defaults.keys() | KERNEL_OPTIONS
    }
    states = runtime.states[number]
    # Options that a class does not take again: as it was built.
    with suppress(UnsupportedOptimizer, TypeError, ValueError, AssertionError):
        states = probe(type(inner), options, runtime.precision.master, own)
    kinds = states.kinds | states.scalars
    return Expected(type(inner).__name__, number, kinds, kinds)


def _part(runtime: Runtime, number: int) -> Part:
    return next(part for part in runtime.parts if number in part.groups)


def rows_here(runtime: Runtime, expected: Expected) -> Iterator[tuple[int, int]]:
    """The rows of a parameter that are updated as one tensor each."""
    return map(runtime.owners.rows, expected.tensors)
