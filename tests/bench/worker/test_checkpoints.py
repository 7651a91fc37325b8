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
from zerokit.bench.worker.measured import Measured
from zerokit.errors import ZerokitError


def _keeper(save: str, *, resume: bool) -> Keeper:
    optimizer = zerokit.ZeroOptimizer(nn.Linear(4, 4), torch.optim.AdamW, precision="fp32")
    return Keeper(Settings(model="gpt-tiny", seq_len=16, seed=0, save=save, resume=resume), optimizer)


def _resumed(folders: list[tuple[str, bool]]) -> list[tuple[int | str, list[str]]]:
    """On a rank: the step with which a bench begins, or why it does not, and its notes; `resume` beside each folder."""
    found: list[tuple[int | str, list[str]]] = []
    for folder, resume in folders:
        keeper = _keeper(folder, resume=resume)
        try:
            found.append((keeper.resume().step, keeper.done.notes))
        except ZerokitError as error:
            found.append((str(error), []))
    return found


def _saved(folder: str) -> None:
    """A run with steps 3 and 5."""
    for step in (3, 5):
        keeper = _keeper(folder, resume=False)
        keeper.after_step(Measured(trained=step), last=True)
        assert [one.step for one in keeper.done.saves] == [step]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "run"
    run_ranks(1, _saved, str(path))
    return path


def test_a_bench_goes_on_from_the_newest_and_replaces_nothing(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    places = [run, run, run / "step-00000003", tmp_path / "file", tmp_path / "file", *[tmp_path / "new"] * 2]
    asked = [(str(place), resume) for place, resume in zip(places, [True, False] * 4, strict=False)]
    for found in run_ranks(2, _resumed, asked):
        newest, fresh, inside, *blocked, new, also_new = (step for step, _ in found)
        assert (newest, new, also_new) == (5, 0, 0)
        assert fresh == (
            f"{run} already has step 5, and this bench starts after step 0. Committed steps are never replaced: "
            "--resume, or --save elsewhere"
        )
        assert "is a checkpoint itself" in str(inside)
        assert all("is not a directory" in str(why) for why in blocked)
        assert len(blocked) == 2


def test_a_latest_that_was_set_back_is_passed_over(run: Path) -> None:
    """The newest step is the highest that is whole; the record says so, not a warning in a rank's log."""
    latest = (run / "latest").read_bytes()
    crc = zerokit.Checkpoint(run / "step-00000003").manifest_crc
    (run / "latest").write_text(f"step-00000003 {crc:08x}\n")
    notes = [
        "latest names step-00000003, whose successor was committed all the same; "
        f"step-00000005 is taken as the newest of {run}"
    ]
    try:
        assert run_ranks(1, _resumed, [(str(run), True)]) == [[(5, notes)]]
    finally:
        (run / "latest").write_bytes(latest)
