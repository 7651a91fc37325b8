"""Flat tensors are divided where their parameters are no longer trained alike.

The optimizer counts steps, and skips what has no gradient, by tensor. A flat tensor serves all parameters of a unit and
group while they are trained alike; a parameter that is frozen later, or that a checkpoint brings another count for,
gets a flat tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.layout import Interval
from zerokit.runtime.storage import MasterSlice, UnitState


def divide_flats(storage: UnitState, inner: Optimizer, key: Callable[[int], object]) -> None:
    """Divide the unit's flat tensors until parameters in one of them have equal keys, given by position."""
    divided = []
    for flat in storage.flats:
        runs = [next(members) for _, members in groupby(storage.positions_in(flat), key)]
        starts = [flat.interval.start, *(storage.unit.slices[first].offset for first in runs[1:])]
        if len(starts) == 1:
            divided.append(flat)
            continue
        pieces = [
            Interval(start, stop)
            for start, stop in zip(starts, [*starts[1:], flat.interval.stop], strict=True)
        ]
        divided += _replace(storage, flat, pieces, inner)
    storage.flats = divided


def _replace(
    storage: UnitState, flat: MasterSlice, pieces: list[Interval], inner: Optimizer
) -> list[MasterSlice]:
    state: dict[str, Any] = inner.state.pop(flat.tensor, {})
    made = []
    for piece in pieces:
        start, stop = piece.start - flat.interval.start, piece.stop - flat.interval.start
        master = flat.tensor.detach()[start:stop]
        tensor = nn.Parameter(master.clone() if storage.separate else master)
        if state:
            inner.state[tensor] = {name: _piece_of(value, flat, start, stop) for name, value in state.items()}
        made.append(MasterSlice(flat.group, piece, tensor))
    params = inner.param_groups[flat.group]["params"]
    index = next(index for index, tensor in enumerate(params) if tensor is flat.tensor)
    params[index : index + 1] = [one.tensor for one in made]
    return made


def _piece_of(value: Any, flat: MasterSlice, start: int, stop: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value[start:stop] if value.shape == flat.tensor.shape else value).clone()


def cut_flats(storage: UnitState, inner: Optimizer, pieces: Sequence[tuple[int, int, int]]) -> None:
    """Have the flat tensors that `pieces` names by group, start and stop; masters and states are to be loaded.

    They cover what the present ones cover.
    """
    if [(flat.group, flat.interval.start, flat.interval.stop) for flat in storage.flats] == list(pieces):
        return
    made: list[MasterSlice] = []
    for group, start, stop in pieces:
        kept = storage.slice_of(Interval(start, stop))
        master = kept.to(storage.flats[0].tensor.dtype) if storage.separate else kept
        made.append(MasterSlice(group, Interval(start, stop), nn.Parameter(master.detach())))
    for number, entry in enumerate(inner.param_groups):
        old = [flat.tensor for flat in storage.flats if flat.group == number]
        if old:
            params = entry["params"]
            index = next(index for index, tensor in enumerate(params) if tensor is old[0])
            params[index : index + len(old)] = [flat.tensor for flat in made if flat.group == number]
    for flat in storage.flats:
        inner.state.pop(flat.tensor, None)
    storage.flats = made
    storage.guard_flats()


def level_momentum(inner: Optimizer) -> None:
    """Let tensors that begin late in a group go together with the others: a fused kernel wants all buffers or none.

    SGD's first step takes the gradient as its momentum, which a momentum of zeros gives as well, without dampening.
    """
    for group in inner.param_groups:
        active = [tensor for tensor in group["params"] if tensor.grad is not None]
        have = [tensor for tensor in active if inner.state[tensor].get("momentum_buffer") is not None]
        if not have or len(have) == len(active):
            continue
        if group.get("dampening"):
            group["fused"] = False
            continue
        for tensor in active:
            if inner.state[tensor].get("momentum_buffer") is None:
                inner.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
