"""The parts of a step, and communication that nothing hides."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._C._autograd import DeviceType

from tests.support.distributed import run_ranks
from zerokit.bench.engines.trainer import Batch, Trainer, make
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.measure.phases import (
    STEPS,
    Parts,
    Span,
    combine,
    exposed,
    measure_phases,
    merge,
    on_device,
)
from zerokit.bench.record import Phases
from zerokit.bench.record.settings import Settings
from zerokit.bench.worker.training import Loop
from zerokit.bench.workloads.build import load

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)
HERE = Accelerator(torch.device("cpu"), "gloo")


def covered(spans: list[Span]) -> set[int]:
    """The unit intervals [n, n+1] that lie in some span."""
    return {number for start, end in spans for number in range(int(start), int(end))}


@given(SPANS)
def test_merged_spans_cover_the_same_and_do_not_touch(spans: list[Span]) -> None:
    merged = merge(spans)
    assert covered(merged) == covered(spans)
    assert all(start < end for start, end in merged)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))


@given(SPANS, SPANS)
def test_exposed_is_what_no_computation_covers(communication: list[Span], computation: list[Span]) -> None:
    assert exposed(communication, computation) == len(covered(communication) - covered(computation))


@given(SPANS, SPANS)
def test_computation_hides_and_never_adds(communication: list[Span], computation: list[Span]) -> None:
    assert exposed(communication, []) >= exposed(communication, computation) >= 0
    assert exposed(communication, communication) == 0


def test_a_steps_parts_are_those_of_its_slowest_rank() -> None:
    fast, slow = Parts(1.0, 2.0, 3.0, 0.5), Parts(2.0, 4.0, 1.0, 0.25)
    slower = Parts(10.0, 20.0, 30.0, 7.0)
    phases = combine([[fast, fast, slower], [slow, slow, fast]], [])
    assert phases == Phases(3, 2.0, 4.0, 1.0, 0.25, "clock")


def test_without_an_answer_from_every_step_nothing_is_said_of_exposure() -> None:
    known, unknown = Parts(1.0, 1.0, 1.0, 0.5), Parts(1.0, 1.0, 1.0, None)
    assert combine([[known, unknown]], []).exposed_communication_ms is None


def test_a_trace_knows_better_than_the_clock() -> None:
    phases = combine([[Parts(1.0, 1.0, 1.0, None)]] * 2, [(12.0, 3.0), (13.0, 4.0)])
    assert (phases.exposed_communication_ms, phases.source) == (4.0, "trace")


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
    """Of a CPU, since there may be no other: the attributes that `on_device` reads exist, nothing ran on a device."""
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


@dataclass
class TwoBatches:
    asked: list[int]

    def batches(self, step: int) -> list[Batch]:
        self.asked.append(step)
        return [(), ()]


def measured_by_hand() -> tuple[Phases, list[str], list[int]]:
    trainer, source = Timed(), TwoBatches([])
    with mock.patch("zerokit.bench.measure.phases._now", side_effect=lambda _: trainer.now_s):
        return measure_phases(trainer, source.batches, HERE, steps=3), trainer.calls, source.asked


def test_every_part_of_every_micro_batch_counts() -> None:
    by_rank = run_ranks(2, measured_by_hand)
    for phases, calls, asked in by_rank:
        assert phases == by_rank[0][0]
        assert calls == ["forward", "forward", "update"] * 3
        assert asked == [0, 1, 2]
        assert phases.steps == 3
        assert phases.forward_ms == pytest.approx(8.0)
        assert phases.backward_ms == pytest.approx(16.0)
        assert phases.optimizer_ms == pytest.approx(12.0)
        assert phases.exposed_communication_ms == pytest.approx(2.0)


def train(engine: str, stage: int) -> Phases:
    settings = Settings(
        engine=engine,
        stage=stage,
        model="gpt-tiny",
        precision="fp32",
        seq_len=16,
        data="synthetic",
        nproc_per_node=2,
    )
    loaded = load(settings)
    trainer = make(loaded, settings, HERE)
    return measure_phases(trainer, Loop(trainer, loaded, settings, HERE).batches, HERE, steps=30)


@pytest.mark.parametrize(
    ("engine", "stage", "check"),
    [
        ("zerokit", 3, lambda waited, total: 0.0 < waited < total),
        ("parameter-server", 0, lambda waited, total: 0.0 < waited < total),
        ("compute-only", 0, lambda waited, total: waited == 0.0),
        ("ddp", 0, lambda waited, total: waited is None),
    ],
)
def test_engines_that_can_be_asked_tell_how_long_they_wait(
    engine: str, stage: int, check: Callable[[float | None, float], bool]
) -> None:
    first, second = run_ranks(2, train, engine, stage)
    assert first == second
    assert first.steps == STEPS
    assert first.source == "clock"
    assert min(first.forward_ms, first.backward_ms, first.optimizer_ms) > 0.0
    total = first.forward_ms + first.backward_ms + first.optimizer_ms
    assert check(first.exposed_communication_ms, 2 * total)
