"""A disk that fails at any call: all ranks say so, training goes on, the newest step is whole, the next save works."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

import zerokit
from tests.support.crashes import CALLS, SPACE, Failing, Unsynced
from tests.support.distributed import run_ranks
from tests.support.saving import How, newest_step, small_optimizer, train
from zerokit import files
from zerokit.checkpoint.save import save
from zerokit.checkpoint.staging import leftovers


@dataclass(frozen=True)
class Fault:
    """Once, or from there on for the calls of these names."""

    code: int = errno.EIO
    lasting: tuple[str, ...] = ()


CASES = {
    "first, EIO once": (How(), Fault()),
    "background, full from there on": (How(blocking=False), Fault(errno.ENOSPC, SPACE)),
    "overwrite by renames, EIO once": (How(overwrite=True, exchanges=False), Fault()),
    "retention, EIO from there on": (How(keep_last=1), Fault(lasting=CALLS)),
}


def _faults(folder: str, how: How, fault: Fault) -> list[int]:
    """One fault after the other in one training: at every fourth call of rank 0, then at every second of rank 1."""
    rank, met = dist.get_rank(), []
    optimizer = small_optimizer()
    run = Path(folder, "run")
    save(run, optimizer, step=1)
    step = 1
    for victim in (0, 1):
        number = 0
        while True:
            number += (4, 2)[victim] if number else 1
            if how == How():  # each time into a directory that is not there yet
                run = Path(folder, f"run-{victim}-{number}", "inner")
            step += not how.overwrite
            reached = _one_fault(run, optimizer, how, fault, step, number if rank == victim else 0)
            step += not how.overwrite
            if not any(reached):
                break
        met.append(number - 1)
    return met


def _one_fault(
    run: Path, optimizer: zerokit.ZeroOptimizer, how: How, fault: Fault, step: int, number: int
) -> list[bool]:
    """Whether the ranks came to that call; `number` is 0 on those that meet no fault."""
    rank = dist.get_rank()
    train(optimizer)
    before = newest_step(run)
    dist.barrier()
    disk = Failing(
        number or 1 << 30, fault.code, lasting=fault.lasting if number else (), exchanges=how.exchanges
    )
    said = ""
    with files.replaced(disk):
        try:
            how.save(run, optimizer, step)
        except zerokit.CheckpointError as error:
            said = str(error)
    train(optimizer)
    reached, messages = [False] * 2, [""] * 2
    dist.all_gather_object(reached, disk.reached and number > 0)
    dist.all_gather_object(messages, said)
    assert messages[0] == messages[1]
    assert said or not any(reached) or number != 1, "the first call failed, and nobody said so"
    assert not said or os.strerror(fault.code) in said
    assert fault.lasting != SPACE or not list(run.glob(".*"))  # nothing half done takes space
    if rank == 0:
        after = newest_step(run)
        assert said or after is not None
        assert after == before or (after is not None and after[0] == step)
        assert said or after != before
    dist.barrier()
    with files.replaced(Unsynced()):
        how.save(run, optimizer, step + (not how.overwrite))
    found = newest_step(run)
    assert found is not None
    assert found[0] == step + (not how.overwrite)
    assert not [left.path.name for left in leftovers(run) if left.gone]
    dist.barrier()
    return reached


@pytest.mark.parametrize("case", CASES)
def test_a_fault_of_the_disk_is_everybodys_and_the_next_save_works(case: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, _faults, str(tmp_path), *CASES[case])
    assert first == second
    assert first[0] > 20
    assert first[1] > 3
