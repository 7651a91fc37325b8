"""What CUDA needs, without a GPU. Norms, clipping and control values are fake tensors with a device and no values.

Whoever looks at a value on the host, or mixes devices, raises.
"""

from __future__ import annotations

import datetime
import math
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.recording import Group, RecordingRoute
from tests.support.streams import PromptStream
from zerokit.errors import ScheduleError
from zerokit.layout import Interval
from zerokit.placement import Mesh
from zerokit.runtime import collectives
from zerokit.runtime.collectives import make_collectives, stalls
from zerokit.runtime.collectives.nccl import Communicators, NcclCollectives, NcclRoute, make_nccl
from zerokit.runtime.collectives.stalls import StallReporter
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.memory import ResizedMemory
from zerokit.runtime.step import StepControl, all_finite, clip_coefficient, global_norm

SIZES = (1, 100, 1 << 17, 0)
NORM_TYPES = (1.0, 2.0, 3.0, math.inf)


@pytest.fixture
def route() -> RecordingRoute:
    route = RecordingRoute(runs_ahead=True)
    route.device = torch.device("cuda")
    return route


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_are_measured_and_scaled_on_the_device(
    route: RecordingRoute, dtype: torch.dtype, norm_type: float
) -> None:
    with FakeTensorMode():
        shards = [torch.empty(size, device="cuda", dtype=dtype) for size in SIZES]
        norm = global_norm(shards, norm_type, route)
        coefficient = clip_coefficient(norm, 1.0)
        for value in (norm, coefficient):
            assert (value.device.type, value.dtype, value.shape) == ("cuda", torch.float64, ())
        with pytest.raises(RuntimeError):
            float(norm)
        for own in (shards, shards[-1:], []):
            finite = all_finite(own, route.device)
            assert (finite.device.type, finite.dtype, finite.shape) == ("cuda", torch.bool, ())
        units = {
            number: SimpleNamespace(of=lambda _, own=own: own, state=SimpleNamespace(updated=None))
            for number, own in enumerate(shards)
        }
        factor = torch.where(norm.isfinite(), coefficient / 1024.0, 1.0)
        Gradients.scale(SimpleNamespace(units=units, _collectives=route), factor)  # type: ignore[arg-type]
        assert {(shard.device.type, shard.dtype) for shard in shards} == {("cuda", dtype)}


class _Route(NcclCollectives):
    """One rank of two, whose control values go nowhere."""

    def __init__(self) -> None:
        group, device, reporter = Group(0, 2), torch.device("cuda"), StallReporter(Group(0, 1))
        streams = [PromptStream(device) for _ in range(3)]
        routes = [NcclRoute((group, group), (streams[0], streams[1]), reporter)]
        super().__init__(
            group, Mesh(1, 2), routes, device, reporter, datetime.timedelta(seconds=1), streams=streams
        )
        self.reduced: list[Tensor] = []

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        self.reduced.append(values)

    def _on_host(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)  # without a driver no memory can be pinned


def test_control_values_are_not_read_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # `copy_` looks for a driver even where tensors are fake.
    monkeypatch.setattr(Tensor, "copy_", lambda to, values, **_: torch._foreach_copy_([to], [values]))
    route = _Route()
    gradients = SimpleNamespace(received=True, skipped=lambda storage: ())
    inner = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    control = StepControl(route, [], gradients, inner)  # type: ignore[arg-type]
    with FakeTensorMode():
        assert control.agree(None)
    (values,) = route.reduced
    assert (values.device.type, values.dtype, values.shape) == ("cuda", torch.float64, (4,))


class _NamedStream(PromptStream):
    """Notes which threads ask for what is unfinished."""

    asked: ClassVar[set[str]] = set()

    def unfinished(self) -> str:
        self.asked.add(threading.current_thread().name)
        return "all-gather of unit 7"


def test_a_device_is_asked_by_the_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread would have set no device, and begin a context on the first one."""
    store = HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: store)
    monkeypatch.setattr(stalls, "OTHERS_S", 0.0)
    group = Group(0, 2)
    route = make_nccl(
        Communicators(group, ((group, group),)),
        Mesh(1, 2),
        torch.device("cuda"),
        StallReporter(group),
        datetime.timedelta(seconds=0.5),
        make_stream=_NamedStream,
    )
    _NamedStream.asked.clear()
    with pytest.raises(ScheduleError, match="did not get through its all-gather of unit 7"):
        route.until(lambda: None)
    assert _NamedStream.asked == {threading.current_thread().name}
    assert "all-gather of unit 7" in store.get(f"zerokit/{group.group_name}/0").decode()


def test_communicators_outlive_every_wait_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[datetime.timedelta] = []

    def make(
        group: object, mesh: object, device: object, timeout: datetime.timedelta, reporter: object
    ) -> Communicators:
        made.append(timeout)
        return Communicators(Group(0, 1), ((Group(0, 1), Group(0, 1)),))

    monkeypatch.setattr(collectives, "communicators_of", make)
    monkeypatch.setattr(collectives, "require_current_device", lambda device: None)
    monkeypatch.setattr(collectives, "_backend_of", lambda group, device: "nccl")
    monkeypatch.setattr(make_nccl, "__kwdefaults__", {"make_stream": PromptStream, "averages": True})
    wait = datetime.timedelta(seconds=30)
    route = make_collectives(Group(0, 1), torch.device("cuda"), wait, units=1)
    assert made == [2 * wait + datetime.timedelta(minutes=1)]
    assert route._timeout_s == wait.total_seconds()


def test_memory_that_is_there_is_not_allocated_anew() -> None:
    memory = ResizedMemory(torch.arange(8.0), Interval(0, 4))
    address = memory.whole.data_ptr()
    memory.grow()
    assert memory.whole.data_ptr() == address
    memory.shrink()
    memory.grow()
    assert memory.whole.untyped_storage().nbytes() == 32
