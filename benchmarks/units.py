"""Flat units of a model as the runtime makes them, for benchmarks of what is done with them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from zerokit.layout import build_layout
from zerokit.runtime.collectives import make_collectives
from zerokit.runtime.modules import take_apart
from zerokit.runtime.storage import FlatUnit


def flat_units(
    model: nn.Module, group: dist.ProcessGroup, *, bucket_bytes: int = 25_000_000
) -> list[FlatUnit]:
    """Move `model`'s fp32 parameters into flat units, cut for the ranks of `group`, with fp32 masters."""
    anatomy = take_apart(model, None, {})
    layout = build_layout(anatomy.segments, world=group.size(), bucket_bytes=bucket_bytes)
    collectives = make_collectives(group, torch.device("cpu"), None)
    units = []
    for unit in layout.units:
        parameters = [anatomy.named[parameter.name] for parameter in unit.parameters]
        flat = FlatUnit(unit, parameters, collectives, torch.float32, sharded=False)
        flat.adopt()
        flat.make_flats(torch.float32, everything=False)
        units.append(flat)
    return units
