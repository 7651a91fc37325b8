"""The forms of optimizer states: what a rank must know of another's to make room for them, without their elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerokit.layout import Interval
from zerokit.runtime.homes.elsewhere import dense_stride
from zerokit.runtime.masters import Master, WholeMaster
from zerokit.runtime.trials import tensors_in
from zerokit.runtime.unit import UnitState


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor of a state that moves: as many elements as its master's flat slice, or of this shape."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Number:
    """A tensor of a state that every rank has by itself, such as the count of steps."""

    values: Any
    dtype: torch.dtype
    kind: str
    """That of its device."""


def _moves(master: Master, value: Tensor) -> bool:
    """Whether a tensor of its state has elements that move with the master's."""
    if isinstance(master, WholeMaster):
        return value.dim() > 0 and value.numel() > 0 and value.device == master.device
    return value.shape == master.tensor.shape


def moving(master: Master, state: object) -> list[Tensor]:
    """The tensors of a master's state that move with it."""
    return [value for value in tensors_in(state) if _moves(master, value)]


def _form(master: Master, value: Any) -> Any:
    """A state without its elements, as other ranks need it to make theirs."""
    if isinstance(value, Tensor):
        if not _moves(master, value):
            return Number(value.tolist(), value.dtype, value.device.type)
        whole = isinstance(master, WholeMaster)
        return Form(value.dtype, tuple(value.shape), dense_stride(value)) if whole else Form(value.dtype)
    if isinstance(value, dict):
        return {key: _form(master, one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_form(master, one) for one in value)
    return value


def made_of(form: Any, make: Callable[[Form], Tensor], device: torch.device) -> Any:
    """A state of this form, whose moving tensors `make` allocates."""
    if isinstance(form, Form):
        return make(form)
    if isinstance(form, Number):
        own = device if form.kind == device.type else torch.device(form.kind)
        return torch.tensor(form.values, dtype=form.dtype, device=own)
    if isinstance(form, dict):
        return {key: made_of(one, make, device) for key, one in form.items()}
    if isinstance(form, list | tuple):
        return type(form)(made_of(one, make, device) for one in form)
    return form


def forms_in(form: Any) -> Iterator[Form]:
    """In the order of `_moving`."""
    if isinstance(form, Form):
        yield form
    elif isinstance(form, dict | list | tuple):
        for one in form.values() if isinstance(form, dict) else form:
            yield from forms_in(one)


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank has of a unit: the forms of states, {} for none, by position or by whole tensor."""

    divided: bool
    slices: Mapping[int, Any]
    wholes: Mapping[Interval, Any]


def record_of(unit: UnitState, states: Mapping[Tensor, Any]) -> Record:
    """What this rank has, from the `states` of masters."""
    forms = {master: _form(master, states.get(master.tensor, {})) for master in unit.masters}
    slices = {position: forms[master] for master in unit.slices for position in unit.positions_in(master)}
    return Record(unit.divided, slices, {master.whole.interval: forms[master] for master in unit.owned})


def merged(records: Iterable[Record]) -> Record:
    """What all ranks have."""
    divided, slices, wholes = False, dict[int, Any](), dict[Interval, Any]()
    for record in records:
        divided |= record.divided
        slices = {**record.slices, **slices}
        wholes = {**record.wholes, **wholes}
    return Record(divided, slices, wholes)


def flat_one(numel: int, device: torch.device, form: Form) -> Tensor:
    """Memory for a state of a slice of so many elements."""
    return torch.empty(numel, dtype=form.dtype, device=device)


def strided(device: torch.device, form: Form) -> Tensor:
    """Memory for a state of a whole tensor."""
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=device)


def flat(tensor: Tensor) -> Tensor:
    """A tensor's elements as they lie in memory, without a copy if they leave no holes."""
    if tensor.stride() == dense_stride(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1)
