"""Paths that begin with `~`, which shells leave in quotes, in TOML and after `=`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import zerokit
from tests.cli.inside import zerokit_inside as command
from tests.support.on_ranks import on_ranks
from tests.support.saving import small_optimizer
from zerokit.checkpoint.formats import open_source


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@on_ranks(2)
def test_a_run_in_a_home_directory_is_saved_and_loaded(tmp_path: Path) -> None:
    os.environ["HOME"] = str(tmp_path)
    optimizer = small_optimizer()
    assert zerokit.save("~/run", optimizer, step=1) == tmp_path / "run" / "step-00000001"
    saving = zerokit.save("~/run", optimizer, step=2, blocking=False)
    assert saving.wait() == tmp_path / "run" / "step-00000002"
    zerokit.check_run("~/run", after=2)
    with pytest.raises(zerokit.CheckpointError, match="step-00000002, later than step 1"):
        zerokit.check_run("~/run", after=1)
    zerokit.load("~/run", optimizer)


def test_offline_functions_and_commands_follow_it(home: Path, step: Path) -> None:
    assert zerokit.list_steps("~/run") == [100]
    assert zerokit.Checkpoint("~/run").path == step == open_source("~/run").path
    assert zerokit.verify("~/run").intact
    assert zerokit.inspect("~/run").step == 100
    assert zerokit.diff("~/run", "~/run/step-00000100").same
    assert zerokit.reshard("~/run", 2, "~/two").parent == home / "two"
    assert zerokit.consolidate("~/two", "~/model") == home / "model"
    assert zerokit.prune("~/run", keep_last=1).run == home / "run"
    done = command(home, "reshard", "~/run", "--to", "5", "--output=~/five")
    assert done.returncode == 0, done.stderr
    assert zerokit.Checkpoint(home / "five").world == 5
    assert not (home / "~").exists()


def test_a_user_whose_home_is_unknown_is_named(home: Path) -> None:
    with pytest.raises(zerokit.UsageError, match=r"~nobody-here/run: .* write the whole path"):
        zerokit.list_steps("~nobody-here/run")
