"""Directories that appear whole or not at all, what killed writers leave, and steps that are saved again."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.checkpoints import ended_process, example_content, example_layout, leave_work, write_run
from tests.support.crashes import Observed
from tests.support.distributed import run_ranks
from zerokit import files
from zerokit.checkpoint.disk import new_file, write_file
from zerokit.checkpoint.save import save
from zerokit.checkpoint.staging import Foreign, Staging, finish_replacement, leftovers, require_apart
from zerokit.errors import CheckpointError
from zerokit.process import Process


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A target that exists, with one file."""
    target = tmp_path / "out"
    target.mkdir()
    (target / "file").write_text("old")
    return target


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@contextmanager
def staged(target: Path, *, force: bool = False, foreign: Foreign | None = None) -> Iterator[Path]:
    """The directory that is to be `target`."""
    with Staging(target, force=force, foreign=foreign) as staging:
        yield staging.work
        staging.commit()


def nothing(folder: Path) -> str:
    """Everything is zerokit's."""
    return ""


@pytest.mark.parametrize("name", ["é" * 120, os.fsdecode(b"\xff out")], ids=["long", "not UTF-8"])
def test_a_staged_directory_appears_when_it_is_whole(tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    with staged(target) as work:
        assert work.parent == tmp_path
        write_file(work / "a", b"new")
        assert not target.exists()
    assert names(tmp_path) == [target.name]
    assert (target / "a").read_bytes() == b"new"


def test_a_file_system_may_lack_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, *_: int) -> None:
        if _ or os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    with staged(tmp_path / "out") as work, new_file(work / "a", 5000), new_file(work / "empty", 0):
        pass
    assert [(tmp_path / "out" / name).stat().st_size for name in ("a", "empty")] == [5000, 0]


@pytest.mark.parametrize(("kind", "late"), [("file", True), ("empty", True), ("full", False)])
def test_what_exists_is_not_replaced_without_force(tmp_path: Path, kind: str, late: bool) -> None:
    target = tmp_path / "out"

    def appear() -> None:
        if kind == "file":
            target.touch()
        else:
            target.mkdir()
            if kind == "full":
                (target / "file").touch()

    if not late:
        appear()
    with pytest.raises(CheckpointError, match="exists"), staged(target):
        appear()
    assert names(tmp_path) == ["out"]
    assert target.is_file() or names(target) == (["file"] if kind == "full" else [])


def test_force_replaces_what_is_zerokits_only(tmp_path: Path, old: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(old)
    (tmp_path / "home" / "documents").mkdir(parents=True)
    for name, message in (
        ("file", "exists and is not a directory"),
        ("link", "exists and is not a directory"),
        ("home", "holds the directory 'documents': only an earlier output of this kind is replaced"),
        ("none/out", "its parent directory .*none does not exist"),
    ):
        with (
            pytest.raises(CheckpointError, match=message),
            staged(tmp_path / name, force=True, foreign=lambda _: "the directory 'documents'"),
        ):
            pytest.fail("the body ran")
    assert names(tmp_path) == ["file", "home", "link", "out"]


def test_source_and_target_are_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    require_apart(tmp_path / "a", tmp_path / "ab")
    require_apart(tmp_path / "a" / "b", tmp_path / "a" / "b.to-4")
    for source, target, message in (
        ("a", "b/../a/", "the output is the source itself"),
        ("a/b/c", "a", "contains its source"),
        ("link", "a/b", "lies in its source"),
    ):
        with pytest.raises(CheckpointError, match=message):
            require_apart(tmp_path / source, tmp_path / target)


def test_what_killed_writers_have_left_goes_with_the_next_work_beside_it(tmp_path: Path) -> None:
    own = Process.current()
    gone = leave_work(tmp_path, ended_process())
    other = replace(own, start=own.start + 1)  # the number, given to another process
    again = leave_work(tmp_path, other, "other")
    mine = leave_work(tmp_path, own)
    elsewhere = leave_work(tmp_path, replace(own, host="elsewhere", boot="00000000"))
    stranger = tmp_path / ".out.tmp-mine"
    stranger.mkdir()
    assert {left.path for left in leftovers(tmp_path) if left.gone} == {gone, again}
    with staged(tmp_path / "new"):
        pass
    assert set(tmp_path.iterdir()) == {mine, elsewhere, stranger, tmp_path / "new"}
    for path in (elsewhere, stranger, mine):
        for entry in (path / "file", path):
            if entry.exists():
                os.utime(entry, (0, 0))
    assert {left.path for left in leftovers(tmp_path) if left.gone} == {elsewhere}
    assert {left.size for left in leftovers(tmp_path)} == {4}


def test_readers_do_not_disturb_a_replacement(tmp_path: Path, old: Path) -> None:
    """On a file system on which no directories change places. One comes before each rename, one after it."""

    class Read(Observed):
        def rename(self, one: Path, other: Path) -> None:
            look()
            super().rename(one, other)
            look()

    def look() -> None:
        with files.replaced(files.System()):
            finish_replacement(old, patience=0.1)
        seen.append(old.is_dir())

    seen: list[bool] = []
    with (
        pytest.raises(CheckpointError, match="put in place"),  # they are impatient, and put the old one back
        files.replaced(Read(exchanges=False)),
        staged(old, force=True, foreign=nothing) as work,
    ):
        write_file(work / "a", b"new")
    assert names(tmp_path) == ["out"]
    assert names(old) == ["file"]
    assert all(seen)


def test_work_beside_a_replacement_that_was_killed_puts_the_old_one_back(tmp_path: Path, old: Path) -> None:
    old.rename(tmp_path / ".out.replaced")
    (tmp_path / ".new.replaced").mkdir()  # killed a moment later
    (tmp_path / "new").mkdir()
    with staged(tmp_path / "other"):
        pass
    assert names(tmp_path) == ["new", "other", "out"]
    assert (old / "file").read_text() == "old"


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
    assert names(tmp_path / "run") == ["latest", "step-00000007", "step-00000009"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 20 and 100."""
    for step in (20, 100):
        write_run(tmp_path / "run", example_layout(1), example_content(example_layout(1), step=step))
    return tmp_path / "run"


def test_only_later_steps_and_places_that_cannot_be_a_run_are_refused(
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
    zerokit.check_run(run, overwrite=True)
    zerokit.check_run(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    (run / "step-00000200").mkdir()  # not committed
    (run / "step-mine").mkdir()
    zerokit.check_run(run, after=100)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(zerokit.CheckpointError, match="read-only file system, or allows it to others"):
        zerokit.check_run(run, after=100)


def test_another_programs_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    zerokit.check_run(tmp_path / "run")
    # And in a run's own directory it does not hide the steps.
    write_run(tmp_path, example_layout(1), example_content(example_layout(1), step=3))
    assert zerokit.Checkpoint(tmp_path).step == 3
