"""Batches that lie ready: all of them, or as many as fit, in turn."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests.support.distributed import run_ranks
from zerokit.bench.record.settings import Settings
from zerokit.bench.worker.batches import Batches
from zerokit.bench.workloads.build import load

SETTINGS = Settings(model="linear", batch_size=4, accumulate=2)
CPU = torch.device("cpu")


A_STEP = SETTINGS.samples_per_step


def seen(batches: Batches, position: int) -> list[list[float]]:
    return [batch[0].flatten().tolist() for batch in batches.of(position)]


def prepare(
    ahead: bool, fitting: float | None, first: int, count: int, elastic: bool
) -> tuple[int, int | None, list[int], list[int]]:
    """What `prepare` says; of which step the batches of each step are; of how many steps any were made meanwhile.

    `fitting` are the steps whose batches fit, None for the usual limit.
    """
    settings = replace(SETTINGS, elastic=elastic, save="run")
    loaded = load(settings)
    of_a_step = 2 * sum(part.numel() * part.element_size() for part in loaded.batch(0))
    fresh = Batches(loaded, settings, CPU, ahead=False)
    original = {step: seen(fresh, step * A_STEP) for step in range(first + count)}
    limit = {} if fitting is None else {"limit_bytes": int(fitting * of_a_step)}
    batches = Batches(loaded, settings, CPU, ahead=ahead, **limit)
    size = batches.prepare(first * A_STEP, count)
    with patch.object(loaded, "batch", wraps=loaded.batch) as make:
        found = [seen(batches, step * A_STEP) for step in range(first, first + count)]
    made = sorted({call.args[0] // A_STEP for call in make.call_args_list})
    numbers = [next(step for step in original if original[step] == one) for one in found]
    assert size % of_a_step == 0
    return size // of_a_step, batches.repeat_after, numbers, made


@pytest.mark.parametrize(
    ("ahead", "fitting", "first", "count", "expected"),
    [
        (False, None, 3, 4, (0, None, [3, 4, 5, 6], [3, 4, 5, 6])),
        (True, None, 3, 4, (4, None, [3, 4, 5, 6], [])),
        (True, 7.5, 3, 4, (4, None, [3, 4, 5, 6], [])),
        (True, 3.5, 2, 6, (3, 3, [2, 0, 1, 2, 0, 1], [])),
        (True, 3.5, 5, 2, (2, 3, [2, 0], [])),  # resumed: the batches that an uninterrupted run has there
        (True, 0.5, 0, 3, (1, 1, [0, 0, 0], [])),  # one step's always
    ],
)
def test_batches_lie_ready_and_take_turns_where_they_do_not_fit(
    ahead: bool, fitting: float | None, first: int, count: int, expected: object
) -> None:
    assert run_ranks(1, prepare, ahead, fitting, first, count, False) == [expected]


def test_an_elastic_run_waits_for_what_does_not_fit() -> None:
    assert run_ranks(1, prepare, True, 2.5, 2, 4, True) == [(2, None, [2, 3, 4, 5], [4, 5])]


def numbers(world: int, position: int) -> list[int]:
    """On a rank of `world`: the numbers of the samples of its step."""
    loaded = load(SETTINGS)
    batches = Batches(loaded, replace(SETTINGS, nproc_per_node=world), CPU, ahead=False)
    with patch.object(loaded, "batch", wraps=loaded.batch) as make:
        batches.of(position)
    return [call.args[0] + index for call in make.call_args_list for index in range(SETTINGS.batch_size)]


def test_a_step_takes_the_next_samples_at_every_world_size() -> None:
    position = 0
    for world in (2, 1, 3):
        taken = [number for one in run_ranks(world, numbers, world, position) for number in one]
        assert sorted(taken) == list(range(position, position + world * A_STEP))
        position += world * A_STEP


def ranks_differ() -> list[list[float]]:
    batches = Batches(load(SETTINGS), SETTINGS, CPU, ahead=True)
    batches.prepare(0, 1)
    before = seen(batches, 0)
    batches.drop()
    assert seen(batches, 0) == before
    return before


def test_every_rank_has_its_own() -> None:
    first, second = run_ranks(2, ranks_differ)
    assert first != second
