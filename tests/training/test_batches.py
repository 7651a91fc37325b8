"""Steps of the same samples for any number of ranks, that cost all of them the same, and a place that survives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import zerokit
from zerokit.errors import UsageError
from zerokit.training.batches import Batches
from zerokit.training.partition import divide


def lognormal(count: int, seed: int = 0) -> Any:
    """Lengths as texts have them, and what they cost a transformer."""
    lengths = np.round(np.exp(np.random.default_rng(seed).normal(np.log(850), 0.7, count)))
    return lengths, lengths + lengths**2 / 8192


# ---- the arithmetic


@given(
    st.lists(st.floats(0, 1000), max_size=60),
    st.lists(st.sampled_from((0.5, 1.0, 3.0)), min_size=1, max_size=8),
)
def test_each_sample_is_in_one_bin(costs: list[float], speeds: list[float]) -> None:
    bins = divide(np.array(costs), speeds)
    assert len(bins) == len(speeds)
    assert sorted(at for each in bins for at in each.tolist()) == list(range(len(costs)))
    times = [sum(costs[at] for at in each) / pace for each, pace in zip(bins, speeds, strict=True)]
    # Nobody could have been given less than the mean; longest first is at most one sample from it.
    assert max(times) <= sum(costs) / sum(speeds) + max(costs, default=0) / min(speeds) + 1e-6


def test_many_samples_are_dealt_as_evenly() -> None:
    costs = np.exp(np.random.default_rng(1).normal(0, 0.7, 200_000))
    loads = [costs[each].sum() for each in divide(costs, [1.0, 2.0] * 16)]
    assert max(loads[::2]) / (costs.sum() / 48) < 1.01
    assert max(loads[1::2]) / (costs.sum() / 24) < 1.01


@pytest.mark.parametrize(("samples", "most"), [(8, 0.04), (16, 0.01)])
def test_ranks_idle_little_where_round_robin_idles_much(samples: int, most: float) -> None:
    _, costs = lognormal(20_000)
    idle, dealt, beside = [], [], []
    loops = [iter(Batches(costs, samples=8 * samples, rank=rank, world=8)) for rank in range(8)]
    for _ in range(60):
        step = [next(loop) for loop in loops]
        loads = np.array([costs[batch].sum() for batch in step])
        idle.append(1 - loads.mean() / loads.max())
        # No division makes the longest rank shorter than the mean, or than the longest sample.
        least = max(loads.mean(), *(costs[batch].max() for batch in step))
        beside.append(loads.max() / least - 1)
        together = np.array([at for batch in step for at in batch])
        robin = np.array([costs[together[rank::8]].sum() for rank in range(8)])
        dealt.append(1 - robin.mean() / robin.max())
    assert np.mean(idle) < most
    assert np.mean(beside) < 0.002
    assert np.mean(dealt) > 0.2


@pytest.mark.parametrize("pace", [[1.0] * 4, [1.0, 2.0, 1.0, 2.0]])
def test_micro_batches_of_a_time_take_all_ranks_as_long(pace: list[float]) -> None:
    """At stage 3 ranks wait for each other in every micro-batch, and one long sample makes a bin of its own."""
    _, costs = lognormal(2_000)
    options: dict[str, Any] = {"samples": 64, "micro_batches": 6, "pace": pace, "world": 4}
    ranks = [Batches(costs, rank=rank, **options) for rank in range(4)]
    loops = [batches.steps(batches) for batches in ranks]
    waited, whole = [], []
    for _ in range(20):
        loads = np.array([[costs[batch].sum() for batch in next(loop)] for loop in loops])
        times = loads / np.array(pace)[:, None]
        waited.append(times.max(axis=0).sum() / (loads.sum() / sum(pace)))
        whole.append(times.sum(axis=1).max() / (loads.sum() / sum(pace)))
    assert np.mean(waited) < 1.015
    assert np.mean(whole) < 1.01


# ---- steps


def steps_of(world: int, count: int, **options: Any) -> list[Counter[int]]:
    """The samples of each of the first steps, over all ranks."""
    ranks = [Batches(rank=rank, world=world, **options) for rank in range(world)]
    found: list[Counter[int]] = [Counter() for _ in range(count)]
    for batches in ranks:
        for number, step in enumerate(islice(batches.steps(batches), count)):
            for batch in step:
                assert batch, "a rank without a sample"
                found[number].update(batch)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 24},
        {"samples": 24, "micro_batches": 2},
        {"samples": 24, "micro_tokens": 4000},
        {"tokens": 60_000, "micro_tokens": 8_000},
    ],
)
def test_a_step_has_the_same_samples_on_any_number_of_ranks(options: dict[str, Any]) -> None:
    lengths, costs = lognormal(100)
    one = steps_of(1, 12, costs=costs, lengths=lengths, **options)
    for world in (2, 3, 4):
        assert steps_of(world, 12, costs=costs, lengths=lengths, **options) == one
    if "samples" in options:
        assert all(step.total() == 24 for step in one)
    seen = sum(one, Counter())
    assert {seen[at] for at in range(100)} <= {seen.total() // 100, seen.total() // 100 + 1}


@given(st.integers(3, 40), st.integers(1, 40), st.integers(0, 3))
def test_each_sample_comes_once_an_epoch(count: int, samples: int, seed: int) -> None:
    samples = min(samples, count)
    steps = steps_of(1, count, costs=[1.0] * count, samples=samples, seed=seed)
    assert sum(steps, Counter()) == Counter(dict.fromkeys(range(count), samples))


def test_micro_batches_hold_their_tokens_and_are_as_many_on_each_rank() -> None:
    lengths, costs = lognormal(400)
    ranks = [
        Batches(costs, lengths=lengths, samples=64, micro_tokens=6_000, rank=r, world=3) for r in range(3)
    ]
    loops = [batches.steps(batches) for batches in ranks]
    for _ in range(10):
        made = [list(next(loop)) for loop in loops]
        assert len({len(step) for step in made}) == 1
        for batch in (batch for step in made for batch in step):
            assert len(batch) == 1 or lengths[batch].sum() <= 6_000


def test_a_faster_rank_gets_more() -> None:
    costs = np.ones(3000)
    parts = [
        len(next(iter(Batches(costs, samples=300, pace=[1, 2], rank=rank, world=2)))) for rank in range(2)
    ]
    assert parts == [100, 200]


@pytest.mark.parametrize("size", [{}, {"micro_batches": 3}, {"micro_tokens": 3}])
def test_a_rank_of_speed_0_gets_no_samples_and_as_many_passes(size: dict[str, Any]) -> None:
    ranks = [
        Batches(np.ones(40), samples=12, pace=[2, 0, 1], rank=rank, world=3, **size) for rank in range(3)
    ]
    loops = [ranks[0].steps(ranks[0]), ranks[1].steps(ranks[1], [-1]), ranks[2].steps(ranks[2])]
    whole = steps_of(1, 10, costs=np.ones(40), samples=12)
    for number in range(10):
        first, stand_ins, third = (list(next(loop)) for loop in loops)
        assert stand_ins == [[-1]] * len(first)
        assert len(first) == len(third)
        assert Counter(at for batch in first + third for at in batch) == whole[number]
        assert sum(map(len, first)) > sum(map(len, third))
        assert ranks[0].state_dict() == ranks[1].state_dict() == ranks[2].state_dict()
        assert ranks[1].step == number + 1
    with pytest.raises(UsageError, match="stand_in="):
        ranks[1].steps(ranks[1])
    with pytest.raises(UsageError, match="asks for none"):
        next(iter(ranks[1]))


# ---- with a loader


class Numbers(Dataset[int]):
    """Each sample is its index."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 50


def taken(batches: Batches, workers: int) -> Iterator[list[list[int]]]:
    loader = DataLoader(Numbers(), batch_sampler=batches, num_workers=workers)
    for step in batches.steps(loader):
        yield [batch.tolist() for batch in step]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_fetch_ahead_does_not_move_the_place(workers: int) -> None:
    def made() -> Batches:
        return Batches(np.arange(50) + 1.0, samples=8, micro_batches=2, seed=3, rank=0, world=1)

    whole = list(islice(taken(made(), 0), 14))
    first = made()
    begun = list(islice(taken(first, workers), 5))
    assert begun == whole[:5]
    assert first.step == 5
    state = first.state_dict()
    assert all(type(value) is int for value in state.values())
    second = made()
    second.load_state_dict(state)
    assert list(islice(taken(second, workers), 9)) == whole[5:]
    assert second.epoch == pytest.approx(14 * 8 / 50)


def test_a_step_that_was_not_finished_comes_again() -> None:
    batches = Batches([1.0] * 12, samples=6, micro_batches=3, rank=0, world=1)
    loop = batches.steps(batches)
    step = next(loop)
    first = [next(step), next(step)]
    assert batches.state_dict()["step"] == 0
    again = next(batches.steps(batches))
    assert [next(again), next(again)] == first


def test_a_step_left_early_does_not_shift_the_next_one() -> None:
    whole = steps_of(1, 3, costs=[1.0] * 12, samples=6, micro_batches=3)
    batches = Batches([1.0] * 12, samples=6, micro_batches=3, rank=0, world=1)
    found = []
    for number, step in enumerate(islice(batches.steps(batches), 3)):
        found.append(Counter(at for batch in (islice(step, 1) if number == 1 else step) for at in batch))
    assert [found[0], found[2]] == [whole[0], whole[2]]


def test_a_resume_on_other_ranks_goes_on_with_the_next_sample() -> None:
    """4 → 3 → 4 ranks: each sample once an epoch."""
    _, costs = lognormal(96)
    seen: Counter[int] = Counter()
    state: dict[str, int] | None = None
    for world in (4, 3, 4):
        ranks = [Batches(costs, samples=12, seed=5, rank=rank, world=world) for rank in range(world)]
        for batches in ranks:
            if state is not None:
                batches.load_state_dict(state)
        loops = [batches.steps(batches) for batches in ranks]
        for _ in range(16 if world == 3 else 8):
            for loop in loops:
                seen.update(at for batch in next(loop) for at in batch)
        states = [batches.state_dict() for batches in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert seen == Counter(dict.fromkeys(range(96), 4))


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "samples= or tokens="),
        ({"samples": 4, "tokens": 10}, "one of them"),
        ({"samples": 1, "world": 2}, "a sample for each rank"),
        ({"samples": 11}, "1 to 10"),
        ({"samples": 4, "rank": 2, "world": 2}, "rank 2 of 2"),
        ({"samples": 4, "pace": [1, -1], "world": 2}, "a positive number for each of 2 ranks"),
        ({"samples": 4, "pace": [0, 0], "world": 2}, "a positive number for each of 2 ranks"),
        ({"samples": 4, "micro_batches": 2, "micro_tokens": 5}, "one of them"),
        ({"tokens": 1, "world": 2}, "at least that"),
        ({"tokens": 11}, "the dataset has 10, and a step takes no sample twice"),
        ({"tokens": 1, "lengths": [0.0] * 10}, "the dataset has 0"),
        ({"samples": 4, "lengths": [1.0]}, "one a sample each"),
        ({"samples": 4, "micro_tokens": float("nan")}, "a positive number"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Batches([1.0] * 10, **{"rank": 0, "world": 1} | options)


@pytest.mark.parametrize("costs", [[], [[1.0]], [1.0, float("inf")], [-1.0]])
def test_costs_are_numbers_of_at_least_0(costs: Any) -> None:
    with pytest.raises(UsageError, match="a number of at least 0 for each sample"):
        Batches(costs, samples=1, rank=0, world=1)


def test_the_place_of_other_data_is_refused() -> None:
    state = Batches([1.0] * 10, samples=2, rank=0, world=1).state_dict()
    with pytest.raises(UsageError, match=r"'samples': 10.*'samples': 11"):
        Batches([1.0] * 11, samples=2, rank=0, world=1).load_state_dict(state)


def test_a_loop_over_the_loader_alone_has_no_place() -> None:
    batches = zerokit.Batches(torch.ones(10), samples=2, rank=0, world=1)
    for _ in islice(DataLoader(Numbers(), batch_sampler=batches), 2):
        pass
    with pytest.raises(UsageError, match=r"batches\.steps\(loader\)"):
        batches.state_dict()
