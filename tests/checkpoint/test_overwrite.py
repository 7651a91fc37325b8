"""Saving a step again: refused before training where it is asked, replaced in one step where that is wanted."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.checkpoints import example_content, example_layout, write_checkpoint, write_run
from tests.support.distributed import run_ranks
from zerokit import files
from zerokit.checkpoint.save import save
from zerokit.placement import stage_of
from zerokit.process import Process

NAME = "weight"


def _optimizer(value: float, stage: int = 2) -> zerokit.ZeroOptimizer:
    model = nn.Linear(40, 30, bias=False)
    nn.init.constant_(model.weight, value)
    return zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage_of(stage), precision="fp32")


def _value(path: str | Path) -> float:
    """What every weight of the checkpoint is."""
    (found,) = {float(value) for value in zerokit.Checkpoint(path).read("master", NAME).flat}
    return found


def _replaced(directory: str) -> None:
    for value in (1.0, 2.0):
        save(directory, _optimizer(value), step=7, overwrite=True)
        dist.barrier()
        assert _value(directory) == value
        save(directory, _optimizer(value), step=9, overwrite=True)


def test_a_step_is_replaced_and_becomes_the_newest(tmp_path: Path) -> None:
    run_ranks(2, _replaced, str(tmp_path / "run"))
    run_ranks(1, _one_more, str(tmp_path / "run"))
    assert zerokit.Checkpoint(tmp_path / "run").world == 1  # the files of the other world size are gone
    for step in (7, 9):
        assert zerokit.verify(tmp_path / "run" / f"step-{step:08d}").intact
    assert (tmp_path / "run" / "latest").read_text().split()[::2] == ["step-00000007"]
    assert (tmp_path / "run" / "step-00000009" / "superseded").exists()  # of another training by now
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "latest",
        "step-00000007",
        "step-00000009",
    ]


def _one_more(directory: str) -> None:
    save(directory, _optimizer(5.0), step=7, overwrite=True)


def test_a_read_only_run_is_read_although_a_replacement_was_killed_in_it(tmp_path: Path) -> None:
    """A snapshot, say: what its writer has left cannot be tidied there."""
    write_run(tmp_path, example_layout(1), example_content(example_layout(1), step=3))
    new = f".step-00000003.tmp-{replace(Process.current(), boot='00000000')}.abcdef"
    journal = tmp_path / ".step-00000003.replacing"
    journal.write_text(f'{{"new": "{new}", "old": "{new}.old"}}')

    class ReadOnly(files.System):
        def unlink(self, path: Path) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

    with files.replaced(ReadOnly()):
        for path in (tmp_path, tmp_path / "step-00000003"):
            assert zerokit.verify(path).intact
    assert journal.exists()


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux mounts some for every process."""
    read_only = next((path for path in map(Path, ("/sys", "/proc/sys")) if _is_read_only(path)), None)
    if read_only is None:
        monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(
        zerokit.CheckpointError, match="is on a read-only file system, or allows it to others"
    ):
        zerokit.check_run((read_only or tmp_path) / "run")


def _is_read_only(path: Path) -> bool:
    return path.is_dir() and bool(os.statvfs(path).f_flag & os.ST_RDONLY)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 20 and 100."""
    content = example_content(example_layout(1))
    write_checkpoint(
        tmp_path / "run" / "step-00000020", example_layout(1), example_content(example_layout(1), step=20)
    )
    write_run(tmp_path / "run", example_layout(1), content)
    return tmp_path / "run"


def test_later_steps_are_refused_before_training(run: Path) -> None:
    for after, others in ((0, " and 1 more"), (20, ""), (99, "")):
        later = f"run: holds step-00000100{others}, later than step {after}, .*zerokit.load.*overwrite=True"
        with pytest.raises(zerokit.CheckpointError, match=later):
            zerokit.check_run(run, after=after)


def test_what_is_in_nobodys_way_is_accepted(run: Path, tmp_path: Path) -> None:
    zerokit.check_run(run, after=100)
    zerokit.check_run(run, after=100_000)
    zerokit.check_run(run, overwrite=True)
    zerokit.check_run(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    (run / "step-00000200").mkdir()  # not committed
    (run / "step-mine").mkdir()
    zerokit.check_run(run, after=100)


def test_steps_are_numbers(tmp_path: Path) -> None:
    wrong: Any
    for wrong in (-1, 1.5, True, None, "7"):
        with pytest.raises(zerokit.UsageError, match="after="):
            zerokit.check_run(tmp_path, after=wrong)


def test_places_that_cannot_be_a_run(tmp_path: Path, run: Path) -> None:
    (tmp_path / "file").touch()
    for place, message in (
        ("file", "file is not a directory"),
        ("file/run", "file is not a directory"),
        ("run/step-00000020", "step-00000020: is a checkpoint itself"),
        ("run/step-00000020/more", "lies in the checkpoint"),
    ):
        with pytest.raises(zerokit.CheckpointError, match=message):
            zerokit.check_run(tmp_path / place)


def test_another_programs_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    zerokit.check_run(tmp_path / "run")
    # And in a run's own directory it does not hide the steps.
    write_run(tmp_path, example_layout(1), example_content(example_layout(1), step=3))
    assert zerokit.Checkpoint(tmp_path).step == 3


@contextlib.contextmanager
def _as_ordinary_user() -> Iterator[None]:
    """Root may write everywhere; without the rights of root for as long as this lasts."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_a_directory_of_others_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        with _as_ordinary_user(), pytest.raises(zerokit.CheckpointError, match="check its permissions"):
            zerokit.check_run(Path(folder, "run"))
        os.chmod(folder, 0o700)


def _into_a_step(directory: str) -> list[str]:
    optimizer = _optimizer(1.0)
    said = []
    for place in ("step-00000020", "step-00000020/inner"):
        for overwrite in (False, True):
            with pytest.raises(zerokit.CheckpointError) as caught:
                save(os.path.join(directory, place), optimizer, step=1, overwrite=overwrite)
            said.append(str(caught.value))
    return said


def test_a_save_into_a_steps_directory_is_refused(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for messages in run_ranks(2, _into_a_step, str(run)):
        for message in messages:
            assert f'zerokit.save("{run}", optimizer, step=...)' in message
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert zerokit.verify(run / "step-00000020").intact
