"""Moments in eight bits: codes and scales on the device, decoded while their unit is updated, and encoded after it.

What is a moment follows from its name (`MOMENTS`). Masters, averages of weights and all other states stay as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from zerokit.errors import UsageError
from zerokit.owners import Owners
from zerokit.runtime.homes.codes import BLOCK, CodeFormat, Codes, decode
from zerokit.runtime.homes.home import Elements, Home
from zerokit.runtime.masters import OwnedUnit
from zerokit.runtime.moments import MOMENTS, SQUARES, moments_of
from zerokit.runtime.torch_internals import point_at
from zerokit.runtime.trials import OptimizerStates

T = TypeVar("T", bound=OwnedUnit)

_MOMENT = CodeFormat(torch.float8_e4m3fn)
_SQUARE = CodeFormat(torch.float8_e5m2, keeps_small=True)
"""Squares reach over twice as many powers of two as what they are squares of."""


def format_of(kind: str) -> CodeFormat:
    """The codes of a kind of moment."""
    return _SQUARE if kind in SQUARES else _MOMENT


def encoded(kind: str, values: Tensor) -> Codes:
    """The codes of flat elements of a kind of moment; of those on `meta`, memory alone."""
    form = format_of(kind)
    codes = form.empty(values.numel(), values.device)
    if not values.is_meta:
        form.encode(values, codes)
    return codes


def require_codable(
    names: Sequence[str], states: Sequence[OptimizerStates], master: torch.dtype, owners: Owners
) -> None:
    """Raise `UsageError` where there are no moments in float32, or a tensor's blocks are not those of its parameter.

    `names` are those of the optimizer classes, `states` those of its groups.
    """
    if master != torch.float32:
        raise UsageError(
            f"states='fp8' encodes moments in float32, but beside masters in {master} moments are {master}: use "
            "masters in fp32"
        )
    if not any(each.moments for each in states):
        raise UsageError(
            f"states='fp8' encodes moments, and {' and '.join(names)} keeps none in float32 by a known name "
            f"({', '.join(sorted(MOMENTS))}): leave it out"
        )
    for tensor in (tensor for index in owners.units for tensor in owners.of_unit(index)):
        if tensor.interval.start % BLOCK:
            raise UsageError(
                f"states='fp8' has a scale for each {BLOCK} elements of a parameter, and row_blocks= begins a tensor "
                f"{list(tensor.shape)} within them: choose blocks of rows with a multiple of {BLOCK} elements"
            )


@dataclass(frozen=True, slots=True)
class Coded:
    """A moment in codes, or flat elements of it: a tensor of this shape and these strides when it is read."""

    codes: Codes
    form: CodeFormat
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def nbytes(self) -> int:
        return self.codes.codes.numel() * self.dtype.itemsize

    def __getitem__(self, elements: slice) -> Coded:
        """Elements that begin with a block, and end with one or with the parameter's last."""
        start, stop, _ = elements.indices(self.codes.codes.numel())
        part = self.codes.at(start, stop)
        return replace(self, codes=part, shape=(part.codes.numel(),), stride=(1,))

    def read(self) -> Tensor:
        flat = torch.empty(self.codes.codes.shape, dtype=self.dtype, device=self.codes.codes.device)
        decode(self.codes, flat)
        values = flat.view(self.shape)
        if values.stride() == self.stride:
            return values
        return torch.empty_strided(self.shape, self.stride, device=flat.device).copy_(values)


class CodedHome(Home):
    """The device, where moments are codes between steps. Those of one unit are decoded at a time."""

    name = "fp8"

    def __init__(self, device: torch.device) -> None:
        self._optimizers: list[Optimizer] = []
        self._coded = WeakTensorKeyDictionary()
        self._decoded: dict[int, int] = {}
        """Bytes of each unit's moments while they are decoded, by index."""
        self._nothing = torch.full((), float("nan"), device=device)

    def attach(self, inner: Optimizer) -> None:
        self._optimizers.append(inner)

    def _moments(self, unit: OwnedUnit) -> Iterator[tuple[str, Tensor]]:
        for master in unit.masters:
            for inner in self._optimizers:
                yield from moments_of(inner.state.get(master.tensor, {}), master.tensor.shape)

    @property
    def most(self) -> int:  # type: ignore[override]
        return max(self._decoded.values(), default=0)

    def forget(self, unit: OwnedUnit) -> None:
        self._decoded.pop(unit.index, None)

    def leave(self, unit: OwnedUnit) -> None:
        found = list(self._moments(unit))
        self._decoded[unit.index] = sum(tensor.nbytes for _, tensor in found)
        for kind, tensor in found:
            before = self._coded.get(tensor)
            form = format_of(kind)
            codes = form.empty(tensor.numel(), tensor.device) if before is None else before.codes
            form.encode(tensor.detach().reshape(-1), codes)
            stride = torch.empty_like(tensor, device="meta").stride()  # those of a dense one
            self._coded[tensor] = Coded(codes, form, tuple(tensor.shape), stride)
            point_at(tensor, self._nothing.expand(tensor.shape))

    def away(self, unit: OwnedUnit) -> Sequence[Tensor]:
        return [tensor for _, tensor in self._moments(unit) if tensor in self._coded]

    def tour(
        self,
        units: Sequence[T],
        work: Callable[[Sequence[T]], None],
        *,
        writes: bool,
        agree: Callable[[bool], None] | None = None,
    ) -> None:
        if not units:
            work(units)
        for unit in units:
            with self.visiting(unit, writes=writes):
                work([unit])

    @contextmanager
    def visiting(self, unit: OwnedUnit, *, writes: bool) -> Iterator[None]:
        here = self.away(unit)
        for tensor in here:
            point_at(tensor, self._coded[tensor].read())
        try:
            yield
        finally:
            if writes:
                self.leave(unit)
            else:
                for tensor in here:
                    point_at(tensor, self._nothing.expand(tensor.shape))

    def elements(self, unit: OwnedUnit, tensor: Tensor) -> Elements:
        return self._coded[tensor] if tensor in self._coded else tensor.detach()

    def coded(self, tensor: Tensor) -> Codes | None:
        return self._coded[tensor].codes if tensor in self._coded else None
