"""What the operating system refuses to read is no damage: each refused call is an error, or is not needed."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zerokit
from tests.support.checkpoints import Content, example_layout, write_checkpoint
from tests.support.crashes import read_tree
from tests.support.distributed import run_ranks
from tests.support.saving import in_turn, small_optimizer, train
from tests.support.unreadable import ERRORS, Refusing, Work, every_call


def _pruned(run: Path, _: Path) -> list[int]:
    zerokit.prune(run, keep_last=1)
    return zerokit.list_steps(run)


WORKS: dict[str, Work] = {
    "Checkpoint": lambda run, _: zerokit.Checkpoint(run).step,
    "list_steps": lambda run, _: zerokit.list_steps(run),
    "check_run": lambda run, _: zerokit.check_run(run, after=102),
    "inspect": lambda run, _: zerokit.inspect(run),
    "verify": lambda run, _: zerokit.verify(run),
    "diff": lambda run, _: zerokit.diff(run, run / "step-00000102").same,
    "reshard": lambda run, out: read_tree(zerokit.reshard(run, 2, out).parent),
    "consolidate": lambda run, out: read_tree(zerokit.consolidate(run, out)),
    "prune": _pruned,
}


@pytest.mark.parametrize("name", WORKS)
def test_each_call_that_fails_is_an_error_and_no_older_step_takes_the_place(
    name: str, step: Path, content: Content, tmp_path: Path
) -> None:
    """Where the call was needed. Nothing is changed by a command that only reads, nothing removed of what must stay."""
    for number in (101, 102):
        manifest = write_checkpoint(
            step.parent / f"step-00000{number}", example_layout(3), replace(content, step=number)
        )
    (step.parent / "latest").write_text(f"step-00000102 {manifest.to_bytes()[10:18].decode()}\n")
    every_call(WORKS[name], step.parent, tmp_path, removes=name == "prune")


def _load_and_save(directory: str) -> None:
    """One rank's refused call is an error of all, or needed by none: never are steps of two kinds loaded."""
    zero, run = small_optimizer(), Path(directory, "run")
    for step in (1, 2, 3):
        zerokit.save(run, zero, step=step, extra=step)
    for rank in range(dist.get_world_size()):
        _each_refused(rank, run, lambda: zerokit.load(run, zero), 3)
    # The state is whole again, and a refused call of a save leaves the old steps, or the new one beside them.
    assert zerokit.load(run, zero) == 3
    for step in range(4, 60):
        train(zero)
        system = Refusing(run, errno.ESTALE, step - 3)
        fault = "Stale file handle"
        try:
            with system.active() if dist.get_rank() == 0 else nullcontext():
                zerokit.save(run, zero, step=step, extra=step, keep_last=2)
        except zerokit.CheckpointError as error:
            fault = str(error)
        dist.barrier()
        assert "Stale file handle" in fault
        newest = zerokit.list_steps(run)[-1]
        assert newest in (step - 1, step)
        if newest < step:
            assert zerokit.load(run, zero) == newest
            zerokit.save(run, zero, step=step, extra=step)
    zerokit.save(run, zero, step=60, overwrite=True)


def _each_refused(rank: int, run: Path, work: Any, expected: int) -> None:
    errors = cycle(ERRORS)
    for at in count(1):
        number = next(errors)
        system = Refusing(run, number, at)
        try:
            with system.active() if dist.get_rank() == rank else nullcontext():
                found = work()
        except zerokit.CheckpointError as error:
            found = str(error)
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, (found, bool(system.refused)))
        assert [one for one, _ in results] == [found] * len(results)
        assert found == expected or (os.strerror(number) in str(found) and str(run) in str(found))
        if not results[rank][1]:
            return


@pytest.mark.filterwarnings("ignore:.*is saved, but older files stay:zerokit.ZerokitWarning")
def test_one_rank_s_failed_call_is_everyone_s_error(tmp_path: Path) -> None:
    run_ranks(2, in_turn, [_load_and_save], str(tmp_path))
