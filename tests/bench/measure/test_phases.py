"""Clocks of steps and their parts, and communication that nothing hides."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._C._autograd import DeviceType

from tests.bench.clocks import Device
from tests.support.distributed import run_ranks
from zerokit.bench.engines.trainer import Batch, Trainer, make
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.measure.clock import STEPS, Parts, Span, combine, exposed, measure_phases, on_device
from zerokit.bench.record.measured import Phases
from zerokit.bench.record.settings import Settings
from zerokit.bench.worker.training import Loop
from zerokit.bench.workloads.build import load

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)
HERE = Accelerator(torch.device("cpu"), "gloo")


def covered(spans: list[Span]) -> set[int]:
    """The unit intervals [n, n+1] that lie in some span."""
    return {number for start, end in spans for number in range(int(start), int(end))}


@given(SPANS, SPANS)
def test_exposed_is_what_no_computation_covers(communication: list[Span], computation: list[Span]) -> None:
    assert exposed(communication, computation) == len(covered(communication) - covered(computation))


def event(name: str, start: float, end: float, **more: object) -> SimpleNamespace:
    """One of the profiler's, on the device."""
    common = {"device_type": DeviceType.CUDA, "is_user_annotation": False}
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), **(common | more))


def test_of_a_trace_only_work_on_the_device_counts() -> None:
    events = [
        event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 0.0, 10.0),
        event("sm90_xmma_gemm_bf16", 4.0, 6.0),
        event("Memcpy DtoD", 8.0, 12.0),
        event("nccl:all_gather", 0.0, 30.0, is_user_annotation=True),
        event("Optimizer.step#AdamW.step", 0.0, 30.0, is_user_annotation=True),
        event("aten::mm", 0.0, 30.0, device_type=DeviceType.CPU),
    ]
    assert on_device(events) == ([(0.0, 10.0)], [(4.0, 6.0), (8.0, 12.0)])
    assert exposed(*on_device(events)) == 6.0


def test_the_profilers_events_are_as_expected() -> None:
    """The attributes that `on_device` reads exist in events of a CPU, the only device there may be."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        torch.ones(8).sum()
    events = list(profiler.events() or ())
    assert events
    assert all(event.time_range.end >= event.time_range.start for event in events)
    assert on_device(events) == ([], [])
    assert {event.is_user_annotation for event in events} == {False}


class Timed(Trainer):
    """Each part moves a clock of its own, the second rank's further; the update waits for some of its time."""

    def __init__(self) -> None:
        self.factor = 1 + dist.get_rank()
        self.calls: list[str] = []
        self.now_s = self._waited = 0.0

    @property
    def waited_s(self) -> float:
        return self._waited

    def forward(self, batch: Batch) -> Tensor:
        self.calls.append("forward")
        self.now_s += 0.002 * self.factor
        return torch.ones(())

    def backward(self, loss: Tensor) -> None:
        assert float(loss) == 0.5  # of two micro-batches
        self.now_s += 0.004 * self.factor

    def update(self) -> None:
        self.calls.append("update")
        self.now_s += 0.006 * self.factor
        self._waited += 0.001 * self.factor


def by_hand(step: int) -> list[Batch]:
    return [(), ()]


def measure_each(engines: list[tuple[str, int]]) -> tuple[Phases, list[str], list[Phases]]:
    """On a rank: the phases of `Timed`, its calls, and the phases of engines."""
    timed = Timed()
    with mock.patch("zerokit.bench.measure.clock._now", side_effect=lambda _: timed.now_s):
        own = measure_phases(timed, by_hand, HERE, steps=3)
    found = []
    for engine, stage in engines:
        settings = Settings(
            model="gpt-tiny", precision="fp32", seq_len=16, data="synthetic", nproc_per_node=2
        )
        settings = replace(settings, engine=engine, stage=stage)
        loaded = load(settings)
        trainer = make(loaded, settings, HERE)
        found.append(measure_phases(trainer, Loop(trainer, loaded, settings, HERE).batches, HERE, steps=30))
    return own, timed.calls, found


def test_parts_are_those_of_the_slowest_rank_and_engines_that_can_be_asked_tell_how_long_they_wait() -> None:
    engines = [("zerokit", 3), ("ddp", 0)]
    first, second = run_ranks(2, measure_each, engines)
    assert first == second
    own, calls, by_engine = first
    assert calls == ["forward", "forward", "update"] * 3
    parts = (own.steps, own.forward_ms, own.backward_ms, own.optimizer_ms, own.exposed_communication_ms)
    assert parts == pytest.approx((3, 8.0, 16.0, 12.0, 2.0))
    assert own.optimizer_share == pytest.approx(12.0 / 36.0)
    for phases in by_engine:
        assert (phases.steps, phases.source) == (STEPS, "clock")
        assert min(phases.forward_ms, phases.backward_ms, phases.optimizer_ms) > 0.0
        assert phases.optimizer_share is not None
        assert 0.0 < phases.optimizer_share < 1.0
    waited, unknown = (phases.exposed_communication_ms for phases in by_engine)
    assert waited is not None
    assert (waited > 0.0, unknown) == (True, None)


def test_parts_of_ranks_and_traces_are_combined() -> None:
    """A trace knows better than the clock; without an answer from every step nothing is said of exposure."""
    fast, slow, slower = Parts(1.0, 2.0, 3.0, 0.5), Parts(2.0, 4.0, 1.0, 0.25), Parts(10.0, 20.0, 30.0, 7.0)
    unknown = Parts(1.0, 1.0, 1.0, None)
    expected = Phases(3, 2.0, 4.0, 1.0, 0.25, "clock", optimizer_share=1 / 7)
    assert combine([[fast, fast, slower], [slow, slow, fast]], []) == expected
    assert combine([[fast, unknown]], []).exposed_communication_ms is None
    traced = combine([[unknown]] * 2, [(12.0, 3.0), (13.0, 4.0)])
    assert (traced.exposed_communication_ms, traced.source) == (4.0, "trace")


def test_a_device_is_waited_for_before_the_first_step_and_after_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows add up, and what is between them does not count."""
    device = Device()
    wall = SimpleNamespace(perf_counter=lambda: device.over_ms / 1000.0)
    monkeypatch.setattr("zerokit.bench.measure.clock.time", wall)
    clock = device.clock()
    assert clock.read() == []
    device.work(1000.0)  # of before
    for window in range(1, 3):
        for step in range(4):
            clock.begin()
            device.log.append("step")
            device.work(10.0 + step)
            clock.end()
        assert clock.read() == [10.0, 11.0, 12.0, 13.0]
        assert clock.window_ms == pytest.approx(46.0 * window)
        assert device.log == ["synchronize", "record", *["step", "record"] * 4, "synchronize"] * window
        device.work(400.0)  # a checkpoint
