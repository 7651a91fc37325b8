"""Memory in the course of a step: what is held, counted by hand, at every operation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.distributed import run_ranks
from zerokit.bench.engines.trainer import make
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.measure.memory import (
    READINGS,
    MemoryTracker,
    condense,
    measure_timeline,
)
from zerokit.bench.record.measured import MemoryTimeline
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


def test_what_operations_return_is_counted_once_and_for_as_long_as_it_lives() -> None:
    before = torch.ones(1000)
    with MemoryTracker(tuple) as tracker:
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


def test_an_engines_own_figure_is_what_counts() -> None:
    weight, shard = torch.zeros(100), torch.zeros(100)
    use = [(PARAMETERS, weight, 400), (BUFFERS, shard, 40)]
    tracker = MemoryTracker(lambda: use)
    assert track(tracker) == dict.fromkeys(MEMORY_KINDS, 0) | {PARAMETERS: 400, BUFFERS: 40}
    use[1:] = [(PARAMETERS, shard, 40), (PARAMETERS, shard, 400)]  # gathered, and this rank's part in it
    assert track(tracker) == dict.fromkeys(MEMORY_KINDS, 0) | {PARAMETERS: 800}


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=500), st.integers(1, 60))
def test_a_peak_survives_condensing(sizes: list[int], most: int) -> None:
    readings = [(float(at), {ACTIVATIONS: size}) for at, size in enumerate(sizes)]
    kept = condense(readings, most)
    assert len(kept) <= most
    assert max(size[ACTIVATIONS] for _, size in kept) == max(sizes)
    assert kept == sorted(kept, key=lambda reading: reading[0])


def _timelines() -> list[tuple[MemoryTimeline | None, int]]:
    """On a rank: of zerokit and a peer, with the elements of the model."""
    found = []
    base = Settings(model="gpt-tiny", seq_len=16, nproc_per_node=2, precision="fp32", accumulate=2)
    for settings in (base, replace(base, engine="ddp", stage=0)):
        loaded = load(settings)
        trainer = make(loaded, settings, HERE)
        batches = Loop(trainer, loaded, settings, HERE).batches
        found.append((measure_timeline(trainer, batches, 20.0), loaded.model.parameters))
    return found


def test_zerokit_on_two_ranks() -> None:
    """tests/planning/test_memory.py compares all that is tracked with what is planned."""
    first, second = run_ranks(2, _timelines)
    (timeline, parameters), (peers, _) = first
    assert peers is second[0][0] is second[1][0] is None
    assert timeline is not None
    assert len(timeline.seconds) <= READINGS
    assert {part: len(times) for part, times in timeline.parts.items()} == {
        "forward": 2,
        "backward": 2,
        "optimizer": 1,
    }
    sizes = timeline.bytes
    assert min(sizes[PARAMETERS]) == pytest.approx(4 * parameters, rel=0.05)
    assert sizes[OPTIMIZER][-1] == pytest.approx(4 * parameters, rel=0.1)
    assert max(sizes[GRADIENTS]) >= 0.9 * 2 * parameters
    assert max(sizes[ACTIVATIONS]) > 10 * sizes[ACTIVATIONS][-1]


def test_what_is_elsewhere_or_has_no_storage_is_not_counted() -> None:
    elsewhere = torch.ones(10, device="meta")
    with MemoryTracker(lambda: [(OPTIMIZER, elsewhere, 40)]) as tracker:
        there, sparse = elsewhere + 1, torch.ones(0, 3).to_sparse()
        assert track(tracker) == dict.fromkeys(MEMORY_KINDS, 0)
        kept = torch.ones(10)
        assert track(tracker)[ACTIVATIONS] == kept.numel() * ELEMENT
    assert there.is_meta
    assert sparse.is_sparse
