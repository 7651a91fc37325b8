"""Norms, clipping, finiteness and control values on CUDA without a GPU: fake tensors with a device and no values.

Whoever looks at a value on the host, or mixes devices, raises.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.recording import Group, RecordingRoute
from tests.support.streams import PromptStream
from zerokit.runtime.collectives.nccl import Communicators, NcclCollectives
from zerokit.runtime.control import StepControl
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.norms import all_finite, clip_coefficient, global_norm
from zerokit.runtime.watch import Watch

SIZES = (1, 100, 1 << 17, 0)
NORM_TYPES = (1.0, 2.0, 3.0, math.inf)


@pytest.fixture
def shards() -> Iterator[list[Tensor]]:
    with FakeTensorMode():
        yield [torch.empty(size, device="cuda") for size in SIZES]


@pytest.fixture
def route() -> RecordingRoute:
    route = RecordingRoute(runs_ahead=True)
    route.device = torch.device("cuda")
    return route


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_a_norm_and_its_coefficient_stay_on_the_device(
    shards: Sequence[Tensor], route: RecordingRoute, norm_type: float
) -> None:
    norm = global_norm(shards, norm_type, route)
    coefficient = clip_coefficient(norm, 1.0)
    for value in (norm, coefficient):
        assert (value.device.type, value.dtype, value.shape) == ("cuda", torch.float64, ())
    with pytest.raises(RuntimeError):
        float(norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_are_scaled_on_the_device(route: RecordingRoute, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        shards = [torch.empty(size, device="cuda", dtype=dtype) for size in SIZES]
        units = {
            number: SimpleNamespace(of=lambda _, own=own: own, updated=None)
            for number, own in enumerate(shards)
        }
        norm = global_norm(shards, 2.0, route)
        factor = torch.where(norm.isfinite(), clip_coefficient(norm, 1.0) / 1024.0, 1.0)
        Gradients.scale(SimpleNamespace(units=units, _collectives=route), factor)  # type: ignore[arg-type]
        assert {(shard.device.type, shard.dtype) for shard in shards} == {("cuda", dtype)}


class _Route(NcclCollectives):
    """One rank of two, whose control values go nowhere."""

    def __init__(self) -> None:
        group = Group(0, 2)
        members = Communicators(group, group, group)
        device, watch = torch.device("cuda"), Watch(Group(0, 1))
        super().__init__(members, device, watch, datetime.timedelta(seconds=1), make_stream=PromptStream)
        self.reduced: list[Tensor] = []

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        self.reduced.append(values)

    def _on_host(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)  # without a driver no memory can be pinned


def test_control_values_are_not_read_within_a_step(
    monkeypatch: pytest.MonkeyPatch, shards: Sequence[Tensor]
) -> None:
    # `copy_` looks for a driver even where tensors are fake.
    monkeypatch.setattr(Tensor, "copy_", lambda to, values, **_: torch._foreach_copy_([to], [values]))
    route = _Route()
    gradients = SimpleNamespace(received=True, skipped=lambda storage: ())
    control = StepControl(route, [], gradients)  # type: ignore[arg-type]
    assert control.agree(None)
    (values,) = route.reduced
    assert (values.device.type, values.dtype, values.shape) == ("cuda", torch.float64, (4,))


def test_finiteness_is_known_to_the_device_alone(shards: Sequence[Tensor], route: RecordingRoute) -> None:
    for own in (shards, shards[-1:], []):
        finite = all_finite(own, route.device)
        assert (finite.device.type, finite.dtype, finite.shape) == ("cuda", torch.bool, ())
