"""Collectives without other ranks, of which only control values are asked, and the parts that others need."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.layout import Cut, Parameter, Unit
from zerokit.placement import Mesh
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.collectives.route import Route
from zerokit.runtime.collectives.stalls import StallReporter


class Group(dist.ProcessGroup):
    """A process group that knows its rank and its size."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]  # the annotation knows one of two constructors

    @property
    def group_name(self) -> Any:
        return "recorded"


class RecordingRoute(Collectives):
    """One rank of two, which counts its control values and sends none."""

    def __init__(self) -> None:
        reporter, place = StallReporter(Group(0, 1)), Group(0, 2)
        patience = datetime.timedelta(seconds=1)
        super().__init__(place, Mesh(1, 2), [Route(place, reporter)], torch.device("cpu"), reporter, patience)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        self.traffic.control_calls += 1
        self.traffic.control_bytes += values.nbytes * (self.world - 1)


def plain_unit(index: int, numel: int, world: int) -> Unit:
    """A unit of one parameter, for collectives over tensors of any size."""
    return Unit(index, (), (Parameter(f"unit{index}", (numel,)),), Cut(range(0, numel + 1, numel // world)))
