"""Ranks must hold the same model, cut the same way: compared once, at construction; an error names differences."""

from __future__ import annotations

import hashlib
import json

import torch
import torch.distributed as dist

from zerokit.errors import LayoutMismatch
from zerokit.layout import Layout
from zerokit.runtime.collectives import Collectives

_NAMED = 3
"""How many differing parameters an error lists."""


def require_agreement(layout: Layout, settings: dict[str, str], collectives: Collectives) -> None:
    """Raise `LayoutMismatch` on every rank, naming ranks and differences, unless all describe the same thing.

    Costs one all-reduce of eight integers where they agree.
    """
    digest = hashlib.sha256(layout.digest() + json.dumps(settings, sort_keys=True).encode()).digest()
    halves = torch.tensor(
        [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)], dtype=torch.int64
    )
    extremes = torch.cat([halves, -halves]).to(collectives.device)
    collectives.all_reduce(extremes, dist.ReduceOp.MAX)
    numbers = collectives.read(extremes)
    if all(highest == -lowest for highest, lowest in zip(numbers[:4], numbers[4:], strict=True)):
        return
    parameters = {p.name: (list(p.shape), p.dtype, p.group, p.trainable) for p in layout.parameters}
    units = [unit.name for unit in layout.units]
    described = collectives.all_gather_objects((settings, parameters, layout.bucket_bytes, units))
    lines = [
        f"rank {rank}: {difference}"
        for rank, other in enumerate(described)
        for difference in _differences(described[0], other)
    ]
    raise LayoutMismatch(
        "ranks disagree, compared with rank 0:\n  "
        + "\n  ".join(lines)
        + "\nBuild the same model with the same arguments on every rank"
    )


def _differences(first: object, other: object) -> list[str]:
    assert isinstance(first, tuple)
    assert isinstance(other, tuple)
    (settings, parameters, bucket, units), (other_settings, other_parameters, other_bucket, other_units) = (
        first,
        other,
    )
    lines = [
        f"{key} is {other_settings.get(key)}, not {value}"
        for key, value in settings.items()
        if other_settings.get(key) != value
    ]
    if bucket != other_bucket:
        lines.append(f"bucket_mb counts {other_bucket} bytes, not {bucket}")
    if len(parameters) != len(other_parameters):
        lines.append(f"{len(other_parameters)} parameters, not {len(parameters)}")
    names = [
        name
        for name in {**parameters, **other_parameters}
        if parameters.get(name) != other_parameters.get(name)
    ]
    for name in names[:_NAMED]:
        lines.append(f"{name} is {_text(other_parameters.get(name))}, not {_text(parameters.get(name))}")
    if len(names) > _NAMED:
        lines.append(f"and {len(names) - _NAMED} more parameters differ")
    if not lines and units != other_units:
        lines.append(
            f"{len(other_units)} units ({other_units[0]}, …), not {len(units)} ({units[0]}, …): compare units="
        )
    return lines


def _text(parameter: tuple[list[int], str, int, bool] | None) -> str:
    if parameter is None:
        return "absent"
    shape, dtype, group, trainable = parameter
    return f"{dtype}{shape} in group {group}{'' if trainable else ' (frozen)'}"
