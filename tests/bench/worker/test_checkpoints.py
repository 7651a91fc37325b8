"""`Keeper`: what could not be saved after the steps is refused before them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zerokit
from tests.support.distributed import run_ranks
from zerokit.bench.record.settings import Settings
from zerokit.bench.worker.checkpoints import Keeper
from zerokit.bench.worker.training import Measured
from zerokit.errors import ZerokitError


def _keeper(save: str, *, resume: bool) -> Keeper:
    optimizer = zerokit.ZeroOptimizer(nn.Linear(4, 4), torch.optim.AdamW, precision="fp32")
    return Keeper(Settings(model="gpt-tiny", seq_len=16, seed=0, save=save, resume=resume), optimizer)


def _resumed(folder: str, resume: bool) -> int | str:
    try:
        return _keeper(folder, resume=resume).resume().step
    except ZerokitError as error:
        return str(error)


def _noted(folder: str) -> list[str]:
    keeper = _keeper(folder, resume=True)
    keeper.resume()
    return keeper.done.notes


def _saved(folder: str, step: int) -> None:
    keeper = _keeper(folder, resume=False)
    keeper.after_step(Measured(trained=step), last=True)
    assert [one.step for one in keeper.done.saves] == [step]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps 3 and 5."""
    path = tmp_path_factory.mktemp("kept") / "run"
    for step in (3, 5):
        run_ranks(1, _saved, str(path), step)
    return path


def test_a_resumed_bench_goes_on_from_the_newest(run: Path) -> None:
    assert run_ranks(2, _resumed, str(run), True) == [5, 5]


def test_a_fresh_start_where_steps_are_is_refused(run: Path) -> None:
    for refused in run_ranks(2, _resumed, str(run), False):
        assert refused == (
            f"{run} holds step 5 already, and this bench begins after step 0: what is saved is never replaced: "
            "--resume, or --save elsewhere"
        )


def test_places_that_cannot_be_saved_to(run: Path, tmp_path: Path) -> None:
    (inside,) = run_ranks(1, _resumed, str(run / "step-00000003"), False)
    assert "is a checkpoint itself" in inside
    (tmp_path / "file").touch()
    for resume in (False, True):
        (blocked,) = run_ranks(1, _resumed, str(tmp_path / "file"), resume)
        assert "is not a directory" in blocked


def test_a_latest_that_was_set_back_is_passed_over(run: Path) -> None:
    """The newest step is the highest that is whole; the record says so, not a warning in a rank's log."""
    latest = (run / "latest").read_bytes()
    crc = zerokit.Checkpoint(run / "step-00000003").manifest_crc
    (run / "latest").write_text(f"step-00000003 {crc:08x}\n")
    try:
        assert run_ranks(1, _noted, str(run)) == [
            [
                "latest names step-00000003, whose successor was committed all the same",
                f"step-00000005 is taken as the newest of {run}",
            ]
        ]
        assert run_ranks(1, _resumed, str(run), True) == [5]
    finally:
        (run / "latest").write_bytes(latest)


def test_a_new_run_begins_at_nothing(tmp_path: Path) -> None:
    assert run_ranks(1, _resumed, str(tmp_path / "new"), True) == [0]
    assert run_ranks(1, _resumed, str(tmp_path / "new"), False) == [0]
