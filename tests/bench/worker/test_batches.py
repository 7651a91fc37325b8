"""Batches that lie ready: all of them, or as many as fit, in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from tests.support.distributed import run_ranks
from zerokit.bench.record.settings import Settings
from zerokit.bench.worker.training import Batches
from zerokit.bench.workloads.build import load

SETTINGS = Settings(model="linear", batch_size=4, accumulate=2)
CPU = torch.device("cpu")


A_STEP = SETTINGS.samples_per_step


def seen(batches: Batches, position: int) -> list[list[float]]:
    return [batch[0].flatten().tolist() for batch in batches.of(position)]


@dataclass(frozen=True)
class Case:
    """Steps that are asked for, of which so many fit (None: the usual limit), and what is expected.

    `ready`: how many steps' batches lie ready; `of`: of which step the batches of each step are.
    """

    ahead: bool
    fitting: float | None
    first: int
    count: int
    ready: int
    repeat_after: int | None
    of: list[int]
    made: list[int]
    elastic: bool = False


CASES = [
    Case(False, None, 3, 4, 0, None, [3, 4, 5, 6], [3, 4, 5, 6]),
    Case(True, None, 3, 4, 4, None, [3, 4, 5, 6], []),
    Case(True, 3.5, 2, 6, 3, 3, [2, 0, 1, 2, 0, 1], []),
    Case(True, 3.5, 5, 2, 2, 3, [2, 0], []),  # resumed: the batches that an uninterrupted run has there
    Case(True, 0.5, 0, 3, 1, 1, [0, 0, 0], []),
    Case(True, 2.5, 2, 4, 2, None, [2, 3, 4, 5], [4, 5], elastic=True),
]


def prepare_each() -> list[Case]:
    """On a rank: the cases as they are found."""
    found = []
    for case in CASES:
        settings = replace(SETTINGS, elastic=case.elastic, save="run")
        loaded = load(settings)
        of_a_step = 2 * sum(part.numel() * part.element_size() for part in loaded.batch(0))
        fresh = Batches(loaded, settings, CPU, ahead=False)
        original = {step: seen(fresh, step * A_STEP) for step in range(case.first + case.count)}
        limit = {} if case.fitting is None else {"limit_bytes": int(case.fitting * of_a_step)}
        batches = Batches(loaded, settings, CPU, ahead=case.ahead, **limit)
        size = batches.prepare(case.first * A_STEP, case.count)
        with patch.object(loaded, "batch", wraps=loaded.batch) as make:
            shown = [seen(batches, step * A_STEP) for step in range(case.first, case.first + case.count)]
        made = sorted({call.args[0] // A_STEP for call in make.call_args_list})
        of = [next(step for step in original if original[step] == one) for one in shown]
        assert size % of_a_step == 0
        ready, repeat_after = size // of_a_step, batches.repeat_after
        found.append(replace(case, ready=ready, repeat_after=repeat_after, of=of, made=made))
        batches.drop()
        assert seen(batches, case.first * A_STEP) == shown[0]
    return found


def test_batches_lie_ready_and_take_turns_where_they_do_not_fit() -> None:
    """But not those of an elastic run, which waits for what does not fit."""
    assert run_ranks(1, prepare_each) == [CASES]
