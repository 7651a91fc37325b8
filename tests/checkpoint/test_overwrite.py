"""Saving a step again: refused before training where it is asked, replaced in one step where that is wanted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.checkpoints import example_content, example_layout, write_run
from tests.support.distributed import run_ranks
from zerokit.checkpoint.save import save


def _replaced(directory: str, *steps: int) -> None:
    for value, step in itertools.product((1.0, 2.0), steps):
        model = nn.Linear(40, 30, bias=False)
        nn.init.constant_(model.weight, value)
        zero = zerokit.ZeroOptimizer(model, torch.optim.AdamW, precision="fp32")
        save(directory, zero, step=step, overwrite=True)
        dist.barrier()
        assert (zerokit.Checkpoint(directory).read("master", "weight") == value).all()


def test_a_step_is_replaced_and_becomes_the_newest(tmp_path: Path) -> None:
    run_ranks(2, _replaced, str(tmp_path / "run"), 7, 9)
    run_ranks(1, _replaced, str(tmp_path / "run"), 7)
    assert zerokit.Checkpoint(tmp_path / "run").world == 1  # the files of the other world size are gone
    for step in (7, 9):
        assert zerokit.verify(tmp_path / "run" / f"step-{step:08d}").intact
    assert (tmp_path / "run" / "latest").read_text().split()[::2] == ["step-00000007"]
    assert (tmp_path / "run" / "step-00000009" / "superseded").exists()  # of another training by now
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "latest",
        "step-00000007",
        "step-00000009",
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 20 and 100."""
    for step in (20, 100):
        write_run(tmp_path / "run", example_layout(1), example_content(example_layout(1), step=step))
    return tmp_path / "run"


def test_later_steps_and_places_that_cannot_be_a_run_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for place, message in (
        ("file", "file is not a directory"),
        ("file/run", "file is not a directory"),
        ("run/step-00000020", "step-00000020: is a checkpoint itself"),
        ("run/step-00000020/more", "lies in the checkpoint"),
    ):
        with pytest.raises(zerokit.CheckpointError, match=message):
            zerokit.check_run(tmp_path / place)
    wrong: Any
    for wrong in (-1, 1.5, True, None, "7"):
        with pytest.raises(zerokit.UsageError, match="after="):
            zerokit.check_run(tmp_path, after=wrong)
    for after, others in ((0, " and 1 more"), (20, ""), (99, "")):
        later = f"run: holds step-00000100{others}, later than step {after}, .*zerokit.load.*overwrite=True"
        with pytest.raises(zerokit.CheckpointError, match=later):
            zerokit.check_run(run, after=after)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(zerokit.CheckpointError, match="read-only file system, or allows it to others"):
        zerokit.check_run(run, after=100)


def test_what_is_in_nobodys_way_is_accepted(run: Path, tmp_path: Path) -> None:
    zerokit.check_run(run, after=100)
    zerokit.check_run(run, after=100_000)
    zerokit.check_run(run, overwrite=True)
    zerokit.check_run(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    (run / "step-00000200").mkdir()  # not committed
    (run / "step-mine").mkdir()
    zerokit.check_run(run, after=100)


def test_another_programs_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    zerokit.check_run(tmp_path / "run")
    # And in a run's own directory it does not hide the steps.
    write_run(tmp_path, example_layout(1), example_content(example_layout(1), step=3))
    assert zerokit.Checkpoint(tmp_path).step == 3
