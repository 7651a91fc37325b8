"""What owners have of tensors that are updated whole, for a save: slices for the ranks that write them, and the rest.

A master and states of its shape are streams like any others. The owner has them whole, and each rank writes its shard's
slices of them, so they go from owners to shards, one kind after the other. Other states that have tensors stay whole,
in a file of their own, which the owner writes: see `uncut`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerokit.checkpoint.entries import Uncut
from zerokit.checkpoint.extra import encode
from zerokit.checkpoint.state import MASTER, Held, coded_slices, dtype_name, host_bytes, require_name
from zerokit.checkpoint.strict import canonical
from zerokit.checkpoint.together import Together
from zerokit.checkpoint.uncut import UncutFile, plan_uncut
from zerokit.runtime.build import Runtime
from zerokit.runtime.homes import encoded, in_memory
from zerokit.runtime.masters import Master, WholeMaster
from zerokit.runtime.shards import Shards
from zerokit.runtime.trials import tensors_in
from zerokit.runtime.unit import UnitState

_Block = tuple[int, int, int]
"""A tensor that is updated whole: its parameter's position in the line, its first row, and the one after its last."""


class _Form(NamedTuple):
    """How a state can be stored: cut, if it has a `dtype`; with its parameter, if it has a `text`; else in a file."""

    dtype: str = ""
    text: str = ""
    """Equal for equal states."""
    coded: bool = False
    """Whether it is stored in codes."""


@dataclass(frozen=True, slots=True)
class Owned:
    """What all ranks know of what owners have.

    `cut`: by kind, dtype and whether codes are stored, the positions of parameters whose states are cut. `uncut`: the
    files of the others.
    """

    cut: Mapping[tuple[str, str, bool], frozenset[int]]
    uncut: tuple[Uncut, ...]

    def places(self, runtime: Runtime, rank: int) -> Iterator[Held]:
        """The slices that this rank writes; their tensors are on `meta`."""
        for (kind, dtype, coded), positions in self.cut.items():
            for unit in self._units(runtime, positions):
                shard = torch.empty(unit.own.numel, dtype=getattr(torch, dtype), device="meta")
                values = Shards(unit.unit, shard, unit.own)
                yield from _held(runtime, kind, positions, rank, values, coded=coded)

    def spread(self, runtime: Runtime, rank: int) -> Iterator[Held]:
        """The slices that this rank writes, which owners send it: each of one kind after the other. Collective."""
        for (kind, dtype, coded), positions in self.cut.items():
            for unit in self._units(runtime, positions):
                values_of = partial(_values, runtime, unit, kind)
                alone = len(runtime.owners.cut(unit.unit)) == 1
                interval = unit.own if alone else unit.updated
                memory = torch.empty(interval.numel, dtype=getattr(torch, dtype), device=unit.device)
                into = Shards(unit.unit, memory, interval)
                if alone:  # every rank has all of it
                    for master in unit.owned:
                        into.copy(master.like(values_of(master)))
                else:
                    runtime.wholes.spread(unit, values_of, into, counted=False).wait()
                yield from _held(runtime, kind, positions, rank, into, coded=coded)
            runtime.collectives.wait_for_readers()

    def kinds_apart(self, runtime: Runtime) -> dict[Master, tuple[str, ...]]:
        """The kinds of this rank's masters that are in files."""
        places = {(place.position, *place.rows): place for place in self.uncut}
        own = {master: places.get(_block(runtime, unit, master)) for unit, master, _ in _masters(runtime)}
        return {master: place.kinds for master, place in own.items() if place is not None}

    def files(self, runtime: Runtime, rank: int) -> Iterator[UncutFile]:
        """The files that this rank writes. Raises `CheckpointError` for states that cannot be saved."""
        places = {(place.position, *place.rows): number for number, place in enumerate(self.uncut)}
        for unit, master, state in _masters(runtime):
            number = places.get(_block(runtime, unit, master))
            copies = runtime.collectives.world // len(runtime.owners.cut(unit.unit))
            if number is not None and number % copies == rank % copies:
                place = self.uncut[number]
                with runtime.home.visiting(unit, writes=False):
                    states = {kind: state[kind] for kind in place.kinds}
                    file = plan_uncut(place, states)
                    live = {(tensor.data_ptr(), tensor.shape): tensor for tensor in tensors_in(states)}
                    found = [live[t.data_ptr(), t.shape] for t in file.tensors if isinstance(t, Tensor)]
                yield replace(file, tensors=[runtime.home.elements(unit, tensor) for tensor in found])

    def _units(self, runtime: Runtime, positions: frozenset[int]) -> Iterator[UnitState]:
        line = runtime.layout.positions
        for index in runtime.owners.units:
            if any(line[p.name] in positions for p in runtime.layout.units[index].parameters):
                yield runtime.units[index]


def owned_by_all(runtime: Runtime, together: Together, *, weights_only: bool) -> Owned | None:
    """What owners have of a whole state or of weights; None where no tensors are updated whole. Collective.

    Raises `CheckpointError` for states that cannot be saved.
    """
    if not runtime.owners:
        return None

    def own() -> dict[_Block, dict[str, _Form]]:
        return {
            _block(runtime, unit, master): {MASTER: _Form(dtype_name(master.tensor))}
            | (
                {}
                if weights_only
                else {kind: _form(runtime, kind, one, master) for kind, one in state.items()}
            )
            for unit, master, state in _masters(runtime)
        }

    blocks: dict[_Block, dict[str, _Form]] = {}
    for each in together.exchange(together.each(own)):
        blocks |= each
    by_position: dict[int, list[dict[str, _Form]]] = {}
    for block in sorted(blocks):
        by_position.setdefault(block[0], []).append(blocks[block])
    cut: dict[tuple[str, str, bool], set[int]] = {}
    apart: dict[int, set[str]] = {}
    for position, parts in by_position.items():
        for kind in {kind for forms in parts for kind in forms}:
            alike = {forms.get(kind, _Form()) for forms in parts}
            form = alike.pop() if len(alike) == 1 else _Form()
            if form.dtype:
                cut.setdefault((kind, form.dtype, form.coded), set()).add(position)
            elif not form.text:
                apart.setdefault(position, set()).add(kind)
    uncut = [
        Uncut(*block, tuple(sorted(kinds)))
        for block in sorted(blocks)
        if (kinds := apart.get(block[0], set()) & blocks[block].keys())
    ]
    return Owned({key: frozenset(cut[key]) for key in sorted(cut)}, tuple(uncut))


def _masters(runtime: Runtime) -> Iterator[tuple[UnitState, WholeMaster, dict[str, Any]]]:
    for unit in runtime.units:
        for master in unit.owned:
            yield unit, master, runtime.inner.state.get(master.tensor, {})


def _block(runtime: Runtime, unit: UnitState, master: WholeMaster) -> _Block:
    name = unit.unit.parameters[master.whole.position].name
    return runtime.layout.positions[name], *runtime.owners.rows(master.whole)


def _values(runtime: Runtime, unit: UnitState, kind: str, master: WholeMaster) -> Tensor:
    """A master's values or those of its state, flat."""
    value = master.tensor if kind == MASTER else runtime.inner.state.get(master.tensor, {}).get(kind)
    if not isinstance(value, Tensor) or value.shape != master.tensor.shape:
        value = torch.zeros((), device=master.device)  # of a parameter without this state
    else:
        value = in_memory(runtime.home.elements(unit, value))
    return value.detach().expand(master.tensor.shape).reshape(-1)


def _form(runtime: Runtime, kind: str, value: object, master: WholeMaster) -> _Form:
    alike = isinstance(value, Tensor) and value.shape == master.tensor.shape
    require_name(kind, elementwise=alike)
    if isinstance(value, Tensor) and alike:
        return _Form(dtype_name(value, kind), coded=runtime.home.coded(value) is not None)
    if isinstance(value, Tensor) and not value.shape:
        return _Form(text=f"{value.dtype} {bytes(host_bytes(value)).hex()}")
    plain, tensors = encode(value, str(kind))
    return _Form() if tensors else _Form(text=canonical(plain))


def _held(
    runtime: Runtime, kind: str, positions: frozenset[int], rank: int, values: Shards, *, coded: bool
) -> Iterator[Held]:
    for part in values.unit.owned(rank):
        position = runtime.layout.positions[part.parameter.name]
        if position in positions:
            own = values.at(part.memory)
            if coded:
                # What was decoded has the same codes again, and slices begin with blocks.
                yield from coded_slices(kind, position, part, encoded(kind, own))
            else:
                yield Held(kind, position, part, own)
