"""In folders that other users may write in, what they have made is not removed or replaced, and misleads nobody."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import zerokit
from tests.checkpoint.test_prune import make_run
from tests.support.checkpoints import ended_process, leave_work
from zerokit import files
from zerokit.checkpoint.staging import Staging, finish_replacement, finish_replacements, leftovers
from zerokit.errors import CheckpointError
from zerokit.process import Process

_ANOTHER = 54321


@pytest.fixture
def given_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Makes a path another user's: really where that is allowed."""
    given: list[Path] = []
    real = files.is_own
    if os.geteuid() != 0:
        monkeypatch.setattr(files, "is_own", lambda user, folder: not given and real(user, folder))

    def give(path: Path) -> Path:
        given.append(path)
        if os.geteuid() == 0:
            for entry in (*path.rglob("*"), path):
                os.chown(entry, _ANOTHER, _ANOTHER, follow_symlinks=False)
        return path

    return give


def test_a_directory_that_is_exchanged_for_a_link_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at it and its opening."""
    home, tree = tmp_path / "home", tmp_path / "tree"
    for folder in (home, tree / "inner"):
        folder.mkdir(parents=True)
        (folder / "precious").touch()
    opened, real = [], os.open

    def exchange(path: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
        if path == "inner":
            opened.append(path)
            (tree / "inner").rename(tmp_path / "moved")
            (tree / "inner").symlink_to(home)
        return real(path, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", exchange)
    files.remove_tree(tree)
    assert opened == ["inner"]
    assert (home / "precious").exists()
    assert (tmp_path / "moved" / "precious").exists()


@pytest.mark.parametrize("kind", ["directory", "link", "file"])
def test_trees_links_and_files_go(tmp_path: Path, kind: str) -> None:
    home, path = tmp_path / "home", tmp_path / "path"
    home.mkdir()
    (home / "precious").touch()
    if kind == "directory":
        (path / "a" / "b").mkdir(parents=True)
        (path / "a" / "b" / "file").touch()
        (path / "link").symlink_to(home)
    elif kind == "link":
        path.symlink_to(home)
    else:
        path.touch()
    files.remove_tree(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["home"]
    assert (home / "precious").exists()


def test_leftovers_of_other_users_stay(tmp_path: Path, given_away: Callable[[Path], Path]) -> None:
    """Also one whose writer is on another host and idle, and one of the name that is written."""
    idle = leave_work(tmp_path, replace(Process.current(), host="elsewhere", boot="00000000"))
    for entry in (idle / "file", idle):
        os.utime(entry, (0, 0))
    theirs = [given_away(leave_work(tmp_path, ended_process())), given_away(idle)]
    assert {(left.path, left.own, left.gone) for left in leftovers(tmp_path)} == {
        (path, False, False) for path in theirs
    }
    assert {left.describe().rpartition(", ")[2] for left in leftovers(tmp_path)} == {"of another user"}
    assert zerokit.prune(tmp_path).removed == ()
    assert all((path / "file").exists() for path in theirs)


def test_what_others_have_set_aside_is_neither_put_back_nor_waited_for(
    tmp_path: Path, given_away: Callable[[Path], Path]
) -> None:
    aside = tmp_path / ".out.replaced"
    aside.mkdir()
    given_away(aside)
    finish_replacement(tmp_path / "out", patience=1e6)
    (tmp_path / "out").mkdir()
    finish_replacements(tmp_path)
    assert aside.exists()


def test_outputs_of_others_are_not_replaced(tmp_path: Path, given_away: Callable[[Path], Path]) -> None:
    target = tmp_path / "out"
    target.mkdir()
    given_away(target)
    with pytest.raises(CheckpointError, match="another user's: it is not replaced"):
        Staging(target, force=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_steps_of_others_are_not_pruned(tmp_path: Path, given_away: Callable[[Path], Path]) -> None:
    run = make_run(tmp_path / "run", 1, 2, 3)
    step = given_away(run / "step-00000001")
    found = zerokit.prune(run, keep_last=1)
    assert (step, "is another user's") in found.left
    assert step.is_dir()


def test_a_file_system_may_show_own_files_as_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: _ANOTHER)
    files.remove_tree(tree)
    assert not tree.exists()
