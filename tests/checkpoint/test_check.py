"""`check_run` where there is a process group: all ranks call it, and what one finds is raised on all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerokit
from tests.support.checkpoints import example_content, example_layout, write_run
from tests.support.distributed import run_ranks


def _check(runs: list[str], absent: int | None = None) -> str:
    rank = dist.get_rank()
    if rank == absent:
        return "absent"
    try:
        zerokit.check_run(runs[rank])
    except zerokit.ZerokitError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_what_one_rank_finds_is_raised_on_all(tmp_path: Path) -> None:
    layout = example_layout(1)
    write_run(tmp_path / "used", layout, example_content(layout, step=7))
    new, used = str(tmp_path / "new"), str(tmp_path / "used")
    assert run_ranks(2, _check, [new, new]) == ["fine", "fine"]
    both = run_ranks(2, _check, [used, used])
    assert all("used: holds step-00000007, later than step 0" in one for one in both)
    first, second = run_ranks(2, _check, [new, used])  # a node whose directory is another one
    assert first == second.replace("CheckpointError: ", "CheckpointError: rank 1: ", 1)
    assert "used: holds step-00000007" in second


def _shortly(runs: list[str]) -> str:
    return _check(runs, absent=1)


def test_a_rank_that_does_not_come_is_an_error_after_the_time_out(tmp_path: Path) -> None:
    found = run_ranks(2, _shortly, [str(tmp_path)] * 2, timeout=3.0)
    assert found[0].startswith("ScheduleError: check_run(): not all ranks have called it: ")
    assert found[1] == "absent"


def _load_nothing(path: str) -> list[str]:
    model = torch.nn.Linear(2, 2)
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=1, precision="fp32")
    with pytest.raises(zerokit.CheckpointError, match="nowhere: does not exist"):
        zerokit.load(path, optimizer)
    return []


def test_a_load_of_nothing_is_an_error_of_checkpoints_on_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, _load_nothing, str(tmp_path / "nowhere")) == [[], []]
