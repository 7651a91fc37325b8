"""Saves of islands, of which one is killed or fails: all go on from one step, and save again."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerokit
from tests.support.crashes import Counting, Failing
from tests.support.distributed import run_ranks, run_ranks_expecting_errors
from tests.support.islands import model_of, train_step, wrap
from tests.support.on_ranks import on_ranks
from zerokit import files
from zerokit.errors import CheckpointError


class Killed(Counting):
    def instead(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _build() -> tuple[torch.nn.Module, zerokit.ZeroOptimizer]:
    model = model_of(seed=dist.get_rank())
    optimizer = wrap(model, (dist.get_world_size(), 1), cls=torch.optim.AdamW, lr=1e-2)
    zerokit.LocalSteps(optimizer, every=2)
    return model, optimizer


def _begin(run: str, last: int) -> None:
    """Save the steps 1 to `last`."""
    model, optimizer = _build()
    for step in range(1, last + 1):
        train_step(model, optimizer, step, dist.get_rank())
        zerokit.save(run, optimizer, step=step, extra=step)


def _killed(run: str, victim: int, call: int, keep_last: int | None) -> bool:
    """Go on by a step, and kill one island at a call of its save; whether there were so many calls."""
    model, optimizer = _build()
    step = zerokit.load(run, optimizer) + 1
    train_step(model, optimizer, step, dist.get_rank())
    system = Killed(call if dist.get_rank() == victim else 1 << 30)
    with files.replaced(system):
        zerokit.save(run, optimizer, step=step, extra=step, keep_last=keep_last)
    return system.reached


def _resumed(run: str) -> int:
    """The step that this island goes on from; the next one is saved."""
    model, optimizer = _build()
    step: int = zerokit.load(run, optimizer)
    train_step(model, optimizer, step + 1, dist.get_rank())
    zerokit.save(run, optimizer, step=step + 1, extra=step + 1)
    assert zerokit.list_steps(run)[-1] == step + 1
    return step


@pytest.mark.full(default="1-1")
@pytest.mark.parametrize(("victim", "keep_last"), [(0, None), (1, 1)])
def test_islands_go_on_from_one_step_wherever_one_is_killed(
    tmp_path: Path, victim: int, keep_last: int | None
) -> None:
    begun, found = tmp_path / "begun", set()
    run_ranks(2, _begin, str(begun), 2)
    for call in itertools.count(1, 3):
        run = tmp_path / f"run-{call}"
        shutil.copytree(begun, run)
        outcomes = run_ranks_expecting_errors(2, _killed, str(run), victim, call, keep_last)
        if outcomes[victim].value is False:
            break  # its save has fewer calls
        assert outcomes[victim].exitcode == -signal.SIGKILL
        steps = run_ranks(2, _resumed, str(run))
        assert steps[0] == steps[1], call
        found.add(steps[0])
        zerokit.verify(run)
    assert found == {2, 3}


def _failing(run: str) -> None:
    model, optimizer = _build()
    train_step(model, optimizer, 1, dist.get_rank())
    zerokit.save(run, optimizer, step=1)
    with files.replaced(Failing(2 if dist.get_rank() else 1 << 30)):
        zerokit.save(run, optimizer, step=2)


def test_an_island_that_cannot_save_fails_the_save_on_all(tmp_path: Path) -> None:
    first, second = run_ranks_expecting_errors(2, _failing, str(tmp_path))
    assert first.raised("CheckpointError"), first.describe()
    assert "island 1 could not save, so no island has this step" in first.error
    assert second.raised("CheckpointError"), second.describe()
    assert [sorted(path.name for path in tmp_path.glob(f"island-{one}/step-*")) for one in (0, 1)] == [
        ["step-00000001"]
    ] * 2


def test_steps_of_one_number_from_two_saves_are_not_taken_together(tmp_path: Path) -> None:
    """As by a kill while a step is replaced: one island has the new one, the other one the old."""
    run, other = tmp_path / "run", tmp_path / "other"
    run_ranks(2, _begin, str(run), 2)
    run_ranks(2, _begin_otherwise, str(other))
    shutil.rmtree(run / "island-1" / "step-00000002")
    shutil.copytree(other / "island-1" / "step-00000002", run / "island-1" / "step-00000002")
    assert zerokit.list_steps(run) == [1]
    zerokit.check_run(run, after=1)
    zerokit.prune(run / "island-0", keep_last=1)  # of which only one step is left on all
    assert run_ranks(2, _resumed, str(run)) == [1, 1]
    with pytest.raises(CheckpointError, match="step-00000002"):
        zerokit.check_run(run, after=1)


def _begin_otherwise(run: str) -> None:
    model, optimizer = _build()
    train_step(model, optimizer, 7, dist.get_rank())
    zerokit.save(run, optimizer, step=2, extra=2)


@on_ranks(2)
def test_a_step_that_all_islands_have_is_refused_on_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _, optimizer = _build()
    zerokit.save(run, optimizer, step=1)
    with pytest.raises(CheckpointError, match="already saved"):
        zerokit.save(run, optimizer, step=1)
    zerokit.save(run, optimizer, step=1, overwrite=True)
    assert zerokit.list_steps(run) == [1]


def test_an_island_that_came_later_and_has_saved_nothing_does_not_count(tmp_path: Path) -> None:
    run_ranks(2, _begin, str(tmp_path), 2)
    (tmp_path / "island-2").mkdir()  # of three, all killed in their first save
    assert run_ranks(3, _resumed, str(tmp_path)) == [2] * 3
    # Two go on again: the third one's steps are of no save of theirs.
    assert run_ranks(2, _resumed, str(tmp_path)) == [3] * 2
    assert zerokit.list_steps(tmp_path)[-1] == 4
