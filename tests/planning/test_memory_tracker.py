"""Memory in the course of a step: what is held, counted by hand, at every operation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from tests.support.memory_tracker import Held, MemoryTracker
from zerokit.formulas import MEMORY_KINDS

PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, ACTIVATIONS = MEMORY_KINDS
ELEMENT = 4


def track(tracker: MemoryTracker) -> dict[str, int]:
    """A reading now."""
    tracker.read()
    return tracker.readings[-1]


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
            if parameter.grad is not None:
                yield GRADIENTS, parameter.grad, None
        for buffer in model.buffers():
            yield BUFFERS, buffer, None
        for state in optimizer.state.values():
            for value in state.values():
                yield OPTIMIZER, value, None

    batch = torch.ones(samples, width)
    tracker = MemoryTracker(held)
    for _ in range(2):
        tracker.begin_step()
        with tracker:
            loss = model(batch).sum()
            forward = track(tracker)
            loss.backward()
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


def test_the_first_purpose_counts_and_an_engines_own_figure_before_it() -> None:
    weight, shard = nn.Parameter(torch.zeros(100)), torch.zeros(100)
    use = [(PARAMETERS, weight, None), (OPTIMIZER, weight.detach(), None), (BUFFERS, shard, 40)]
    tracker = MemoryTracker(lambda: iter(use))
    assert track(tracker) == dict.fromkeys(MEMORY_KINDS, 0) | {PARAMETERS: 400, BUFFERS: 40}
    use[2:] = [(PARAMETERS, shard, 40), (PARAMETERS, shard, 400)]  # gathered, and this rank's part in it
    assert track(tracker)[PARAMETERS] == 800
    assert track(tracker)[BUFFERS] == 0


def test_what_is_elsewhere_or_has_no_storage_is_not_counted() -> None:
    elsewhere = torch.ones(10, device="meta")
    with MemoryTracker(lambda: iter([(OPTIMIZER, elsewhere, None)])) as tracker:
        there, sparse = elsewhere + 1, torch.ones(0, 3).to_sparse()
        assert track(tracker) == dict.fromkeys(MEMORY_KINDS, 0)
        kept = torch.ones(10)
        assert track(tracker)[ACTIVATIONS] == kept.numel() * ELEMENT
    assert there.is_meta
    assert sparse.is_sparse
