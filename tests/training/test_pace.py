"""`Pace`: what it measures, on what ranks agree, and that samples are trained on as without it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count, islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zerokit
from tests.support.distributed import run_ranks
from zerokit.errors import UsageError
from zerokit.runtime.collectives.stalls import StallReporter
from zerokit.training.computing import DeviceClock, HostClock
from zerokit.training.pace import better

# ---- what is measured


class FakeEvent:
    """An event of a device whose time is read off a counter."""

    ticks = count()

    def __init__(self) -> None:
        self.at = -1

    def record(self) -> None:
        self.at = next(self.ticks)

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1000.0 * (end.at - self.at)


def test_a_device_clock_leaves_waits_out() -> None:
    clock, called = DeviceClock(FakeEvent), []
    clock.waiting(lambda: called.append("before"))  # of no step
    assert not clock.end()
    clock.begin()
    clock.waiting(lambda: FakeEvent().record())
    clock.waiting(lambda: called.append("in"))
    assert clock.end()
    clock.begin()
    clock.begin()  # the first of them was not finished
    assert clock.end()
    assert clock.read() == [3.0, 1.0]
    assert clock.read() == []
    assert called == ["before", "in"]


def _host_clock() -> list[float]:
    ticks = iter([10.0, 15.0, 20.0, 22.0])
    group = dist.group.WORLD
    assert group is not None
    reporter = StallReporter(group)
    clock = HostClock(reporter, lambda: next(ticks))
    clock.begin()
    with reporter.waiting("others"):
        time.sleep(0.05)
    clock.end()
    clock.begin()
    clock.end()
    first, second = clock.read()
    assert first == pytest.approx(5.0 - reporter.waited_s)
    return [first, second]


def test_a_host_clock_leaves_waits_out() -> None:
    ((first, second),) = run_ranks(1, _host_clock)
    assert first <= 4.95
    assert second == 2.0


# ---- on what ranks agree


SPEEDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=8)


@given(SPEEDS, st.floats(0, 0.5))
def test_speeds_change_where_a_step_gets_shorter_by_the_margin(measured: list[float], margin: float) -> None:
    equal = (1.0,) * len(measured)
    found = better(equal, measured, margin)
    saved = 1 - len(measured) * min(measured) / sum(measured)
    if abs(saved - margin) > 1e-9:
        assert (found is not None) == (saved > margin)
    if found is not None:
        mean = sum(measured) / len(measured)
        assert found == pytest.approx([speed / mean for speed in measured], rel=1e-2)
        assert all(found)
        assert better(found, measured, max(margin, 0.2)) is None  # what has been agreed stays


def test_a_rank_that_measured_nothing_changes_nothing() -> None:
    assert better((1.0, 1.0), [3.0, 0.0], 0.0) is None
    assert better((1.0, 1.0), [3.0, float("inf")], 0.0) is None


# ---- with ranks


SAMPLES, STEP = 96, 12


class Time:
    """Time that passes while a rank trains on samples, and not otherwise."""

    now = 0.0
    waited_s = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "zerokit.training.pace.compute_clock", lambda _: HostClock(self, lambda: self.now)
        )


def _model(stage: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    return model, zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, precision="fp32", lr=1e-2)


def _fetched(batches: zerokit.Batches, ahead: int) -> Iterator[list[int]]:
    """The batches as a loader gives them whose workers have fetched some ahead."""
    coming = iter(batches)
    waiting = deque(islice(coming, ahead))
    while True:
        waiting.append(next(coming))
        yield waiting.popleft()


def _train(stage: int, paced: bool, steps: int, ahead: int, state: Any = None) -> dict[str, Any]:
    """Samples and parameters of a training whose rank 1 takes thrice as long for each sample."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return _trained(Time(monkeypatch), stage, paced, steps, ahead, state)


def _trained(time: Time, stage: int, paced: bool, steps: int, ahead: int, state: Any) -> dict[str, Any]:
    model, optimizer = _model(stage)
    data = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    pace = zerokit.Pace(optimizer, every=3) if paced else None
    batches = zerokit.Batches(np.ones(SAMPLES), samples=STEP, micro_batches=2, pace=pace)
    if state is not None:
        batches.load_state_dict(state)
    seen, states = [], [batches.state_dict()]
    for step in islice(batches.steps(_fetched(batches, ahead * (1 + dist.get_rank()))), steps):
        own: list[int] = []
        for batch in step:
            own += batch
            time.now += len(batch) * (3.0 if dist.get_rank() else 1.0)
            loss = (model(data[batch]) - data[batch]).square().sum()
            optimizer.backward(loss, count=len(batch))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(own)
        states.append(batches.state_dict())
    with optimizer.gathered():
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()
    return {"seen": seen, "states": states, "weights": weights, "speeds": pace and pace.speeds}


@pytest.mark.parametrize(("stage", "ahead"), [(2, 0), (3, 3)])
def test_a_slow_rank_gets_fewer_samples_of_the_same_steps(stage: int, ahead: int) -> None:
    paced = run_ranks(2, _train, stage, True, 14, ahead)
    equal = run_ranks(2, _train, stage, False, 14, 0)
    assert paced[0]["states"] == paced[1]["states"]
    assert paced[0]["speeds"] == paced[1]["speeds"]
    assert paced[0]["speeds"] == (1.5, 0.5)
    for one, other in zip(
        *(zip(*(rank["seen"] for rank in run), strict=True) for run in (paced, equal)), strict=True
    ):
        assert Counter(one[0] + one[1]) == Counter(other[0] + other[1])
        assert min(map(len, one)) >= 2  # each micro-batch has a sample
    assert [len(rank["seen"][-1]) for rank in paced] == [10, 2]  # 9 and 3 cannot be halved
    assert [len(rank["seen"][0]) for rank in paced] == [6, 6]
    # The same mean over the same samples, added in another order.
    assert paced[0]["weights"] == pytest.approx(equal[0]["weights"], abs=1e-5)


def test_a_resumed_run_goes_on_with_the_agreed_speeds() -> None:
    whole = run_ranks(2, _train, 2, True, 8, 0)
    state = whole[0]["states"][6]
    assert state["pace"][-1][1] == [1.5, 0.5]
    again = run_ranks(2, _train, 2, True, 2, 0, state)
    for rank in range(2):
        assert again[rank]["seen"] == whole[rank]["seen"][6:8]
        assert again[rank]["states"][0] == state
    # What two ranks have agreed says nothing about three.
    three = run_ranks(3, _train, 2, True, 1, 0, state)
    assert [len(rank["seen"][0]) for rank in three] == [4, 4, 4]


def _idle(stage: int, micro_batches: int) -> dict[str, Any]:
    """A training in which rank 1 has no samples; on one rank the same without it."""
    model, optimizer = _model(stage)
    data = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    speeds = [2, 0, 1] if dist.get_world_size() > 1 else None
    batches = zerokit.Batches(np.ones(SAMPLES), samples=STEP, micro_batches=micro_batches, pace=speeds)
    stand_in = [0, 1]
    for step in islice(batches.steps(batches, stand_in), 4):
        for batch in step:
            real = batch is not stand_in
            loss = (model(data[batch]) - data[batch]).square().sum()
            optimizer.backward(loss * real, count=len(batch) * real)
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.gathered():
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()
    return {"weights": weights, "state": batches.state_dict()}


@pytest.mark.parametrize(("stage", "micro_batches"), [(0, 2), (2, 1), (3, 2)])
def test_a_rank_without_samples_trains_along(stage: int, micro_batches: int) -> None:
    ranks = run_ranks(3, _idle, stage, micro_batches)
    (alone,) = run_ranks(1, _idle, stage, micro_batches)
    assert [rank["state"] for rank in ranks] == [alone["state"]] * 3
    assert ranks[0]["weights"] == pytest.approx(alone["weights"], abs=1e-5)


def _equal(paced: bool) -> list[list[int]]:
    _, optimizer = _model(2)
    pace = zerokit.Pace(optimizer) if paced else None
    batches = zerokit.Batches(np.arange(SAMPLES) + 1.0, samples=STEP, micro_tokens=200, seed=2, pace=pace)
    return [batch for step in islice(batches.steps(batches), 10) for batch in step]


def test_equal_speeds_are_the_batches_without_a_pace() -> None:
    assert run_ranks(2, _equal, True) == run_ranks(2, _equal, False)


def _refused() -> list[str]:
    _, optimizer = _model(2)
    texts = []
    for options in ({"every": 0}, {"every": True}, {"margin": 1.0}, {"margin": float("nan")}):
        with pytest.raises(UsageError) as caught:
            zerokit.Pace(optimizer, **options)
        texts.append(str(caught.value))
    with pytest.raises(UsageError) as caught:
        zerokit.Batches(np.ones(8), samples=4, pace=zerokit.Pace(optimizer), rank=0, world=3)
    return [*texts, str(caught.value)]


def test_what_cannot_be_is_refused() -> None:
    texts = run_ranks(2, _refused)[1]
    assert ["every" in text for text in texts[:2]] == [True, True]
    assert ["margin" in text for text in texts[2:4]] == [True, True]
    assert "pace of rank 1 of 2" in texts[4]
    assert all(a != b for a, b in pairwise(texts))
