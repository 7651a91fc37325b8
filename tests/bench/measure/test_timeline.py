"""Memory: peaks, and in the course of a step what is held, counted by hand, at every operation."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.bench.ranks import import_optimizers
from tests.support.distributed import run_ranks
from zerokit.bench.engines.fsdp2 import TRAINS_ON_CPU
from zerokit.bench.engines.trainer import Held, Trainer, held_by, make
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.measure.memory import READINGS, MemoryMeter, MemoryTracker, condense, measure_timeline
from zerokit.bench.record.measured import DeviceMemory, MemoryTimeline
from zerokit.bench.record.settings import Settings
from zerokit.bench.worker.training import Loop
from zerokit.bench.workloads.build import load
from zerokit.formulas import MEMORY_KINDS

PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, ACTIVATIONS = MEMORY_KINDS
ELEMENT = 4
HERE = Accelerator(torch.device("cpu"), "gloo")


def track(tracker: MemoryTracker) -> dict[str, int]:
    """A reading now."""
    tracker.read()
    return tracker.readings[-1][1]


def nothing() -> Iterator[Held]:
    return iter(())


def test_what_operations_return_is_counted_once_and_for_as_long_as_it_lives() -> None:
    before = torch.ones(1000)
    with MemoryTracker(nothing) as tracker:
        one = before * 2
        views = [one.view(10, 100), one[:5], before[3:]]
        assert track(tracker)[ACTIVATIONS] == 2 * 1000 * ELEMENT  # a view makes what it shows known
        two = torch.stack([one, one])
        assert track(tracker)[ACTIVATIONS] == 4 * 1000 * ELEMENT
        two.untyped_storage().resize_(0)  # as FSDP2 frees what it gathered
        assert track(tracker)[ACTIVATIONS] == 2 * 1000 * ELEMENT
        del one, views
        assert track(tracker)[ACTIVATIONS] == 1000 * ELEMENT
    assert len(tracker.readings) > 4, "operations are read after, too"


def test_a_training_step_by_hand() -> None:
    width, samples = 32, 5
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh(), nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters()) * ELEMENT

    def held() -> Iterator[Held]:
        for parameter in model.parameters():
            yield PARAMETERS, parameter, None
        for buffer in model.buffers():
            yield BUFFERS, buffer, None
        yield from held_by(optimizer)

    batch = torch.ones(samples, width)
    tracker = MemoryTracker(held)
    for _ in range(2):
        tracker.begin_step()
        with tracker:
            tracker.mark("forward")
            loss = model(batch).sum()
            tracker.mark("backward")
            forward = track(tracker)
            loss.backward()
            tracker.mark("optimizer")
            backward = track(tracker)
            del loss
            optimizer.step()
            optimizer.zero_grad()
            end = track(tracker)
    scalars = len(optimizer.state) * ELEMENT  # each parameter's count of steps
    for reading in (forward, backward, end):
        assert reading[PARAMETERS] == trainable
        assert reading[OPTIMIZER] == 2 * trainable + scalars
        assert reading[BUFFERS] == 2 * width * ELEMENT + 8
    assert [reading[GRADIENTS] for reading in (forward, backward, end)] == [0, trainable, 0]
    # What backward needs: the product of the tanh, its input's is not kept; and the mean and deviation of the norm.
    assert samples * width * ELEMENT <= forward[ACTIVATIONS] <= 3 * samples * width * ELEMENT
    assert end[ACTIVATIONS] < backward[ACTIVATIONS] + 8 < forward[ACTIVATIONS]
    assert [len(times) for times in tracker.parts.values()] == [1, 1, 1]
    assert list(tracker.parts) == ["forward", "backward", "optimizer"]


def test_the_first_purpose_counts_and_an_engines_own_figure_before_it() -> None:
    weight, shard = nn.Parameter(torch.zeros(100)), torch.zeros(100)
    use = [(PARAMETERS, weight, None), (OPTIMIZER, weight.detach(), None), (BUFFERS, shard, 40)]
    tracker = MemoryTracker(lambda: iter(use))
    assert track(tracker) == dict.fromkeys(MEMORY_KINDS, 0) | {PARAMETERS: 400, BUFFERS: 40}
    use[2:] = [(PARAMETERS, shard, 40), (PARAMETERS, shard, 400)]  # gathered, and this rank's part in it
    assert track(tracker)[PARAMETERS] == 800
    assert track(tracker)[BUFFERS] == 0


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=500), st.integers(1, 60))
def test_a_peak_survives_condensing(sizes: list[int], most: int) -> None:
    readings = [(float(at), {ACTIVATIONS: size}) for at, size in enumerate(sizes)]
    kept = condense(readings, most)
    assert len(kept) <= most
    assert max(size[ACTIVATIONS] for _, size in kept) == max(sizes)
    assert kept == sorted(kept, key=lambda reading: reading[0])


def _timelines(engines: list[tuple[str, int]]) -> list[tuple[MemoryTimeline | None, int]]:
    """On a rank: of every engine, with the elements of its model."""
    import_optimizers()
    found = []
    for engine, stage in engines:
        settings = Settings(
            model="gpt-tiny",
            seq_len=16,
            nproc_per_node=2,
            engine=engine,
            stage=stage,
            precision="fp32",
            accumulate=2,
        )
        loaded = load(settings)
        trainer: Trainer = make(loaded, settings, HERE)
        batches = Loop(trainer, loaded, settings, HERE).batches
        found.append((measure_timeline(trainer, batches, 20.0), loaded.model.parameters))
    return found


# Bytes of weight, gradient and optimizer a parameter, on one of two ranks. For zerokit
# tests/planning/test_memory.py compares all that is tracked with what is planned.
SHARES = {("zerokit", 2): (4, 2, 4), ("ddp", 0): (4, 4, 8), ("zero-redundancy-optimizer", 1): (4, 4, 4)}
SHARES |= {("fsdp2", 3): (2, 2, 4)} if TRAINS_ON_CPU else {}


def test_engines_on_two_ranks() -> None:
    first, second = run_ranks(2, _timelines, list(SHARES))
    assert all(timeline is None for timeline, _ in second)
    for engine, (timeline, parameters) in zip(SHARES, first, strict=True):
        assert timeline is not None
        assert len(timeline.seconds) <= READINGS
        assert {part: len(times) for part, times in timeline.parts.items()} == {
            "forward": 2,
            "backward": 2,
            "optimizer": 1,
        }
        weights, gradients, states = SHARES[engine]
        sizes = timeline.bytes
        assert min(sizes[PARAMETERS]) == pytest.approx(weights * parameters, rel=0.05), engine
        assert sizes[OPTIMIZER][-1] == pytest.approx(states * parameters, rel=0.1), engine
        assert max(sizes[GRADIENTS]) >= 0.9 * gradients * parameters, engine
        assert max(sizes[ACTIVATIONS]) > 10 * sizes[ACTIVATIONS][-1], engine


def test_what_is_elsewhere_or_has_no_storage_is_not_counted() -> None:
    elsewhere = torch.ones(10, device="meta")
    with MemoryTracker(lambda: iter([(OPTIMIZER, elsewhere, None)])) as tracker:
        there, sparse = elsewhere + 1, torch.ones(0, 3).to_sparse()
        assert track(tracker) == dict.fromkeys(MEMORY_KINDS, 0)
        kept = torch.ones(10)
        assert track(tracker)[ACTIVATIONS] == kept.numel() * ELEMENT
    assert there.is_meta
    assert sparse.is_sparse


def test_the_peak_of_construction_is_not_that_of_the_steps() -> None:
    cuda = Mock(spec=torch.cuda)
    meter = MemoryMeter("one", cuda)
    cuda.max_memory_allocated.return_value, cuda.max_memory_reserved.return_value = 650, 700
    meter.begin()
    cuda.reset_peak_memory_stats.assert_called_once_with("one")
    cuda.max_memory_allocated.return_value = 420
    cuda.mem_get_info.return_value = 150, 1000
    assert meter.peaks() == (420, 700)
    assert meter.account(batch_bytes=30) == DeviceMemory(650, 700, 30, 850, 1000)
