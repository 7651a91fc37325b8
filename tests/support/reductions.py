"""Gradients over a recording route, and backward passes that bring them by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tests.support.recording import Event, RecordingRoute, flat_units
from zerokit.placement import Placement
from zerokit.runtime.gradients import Gradients

Shapes = Sequence[Sequence[tuple[int, ...]]]


def gradients_of(
    route: RecordingRoute,
    stage: int,
    shapes: Shapes,
    *,
    rest: Iterable[int] = (),
    frozen: Iterable[int] = (),
    wire: torch.dtype | None = None,
) -> Gradients:
    storages = flat_units(route, stage, shapes, rest=set(rest), frozen=set(frozen))
    fitting = [storage.unit.numel for storage in storages if storage.unit.trainable]
    return Gradients(
        storages, route, torch.float32, placement=Placement.of(stage, route.mesh), fitting=fitting, wire=wire
    )


def bring(gradients: Gradients, index: int, position: int = 0, value: float = 1.0) -> None:
    """Autograd has accumulated a gradient of this value."""
    parameter = gradients.units[index].storage.parameters[position]
    parameter.grad = torch.full_like(parameter.detach(), value)
    gradients.accept(index, position, parameter)
    assert parameter.grad is None


def values(gradients: Gradients, index: int) -> list[float]:
    """The first elements of the unit's parameters that begin in this rank's piece."""
    unit = gradients.units[index]
    own = unit.storage.own
    found: Tensor = unit.of(own)
    return [
        float(found[part.offset - own.start])
        for part in unit.unit.slices
        if own.start <= part.offset < own.stop
    ]


def reduced(*units: int) -> list[Event]:
    return [("reduce", unit) for unit in units]
