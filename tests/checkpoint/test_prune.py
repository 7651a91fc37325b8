"""Steps that go when newer ones are there, and what killed writers have left: what stays is what somebody may need."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerokit
from tests.cli.inside import zerokit_inside as command
from tests.support.checkpoints import (
    ended_process,
    example_content,
    example_layout,
    leave_work,
    weights_of,
    write_checkpoint,
)
from zerokit import files
from zerokit.checkpoint.latest import Latest, write_latest
from zerokit.checkpoint.prune import Retention, foreign_to_step, prune_after_save
from zerokit.checkpoint.run import (
    Choice,
    find_step,
    list_steps,
    mark_superseded,
    stated_checksum,
    steps_to_supersede,
)
from zerokit.errors import CheckpointError, UsageError
from zerokit.process import Process
from zerokit.text import decimal_size

LAYOUT = example_layout(1)


def make_run(run: Path, *steps: int, weights: tuple[int, ...] = (), latest: int | None = None) -> Path:
    """A run of these steps, of which some hold weights only."""
    for step in steps:
        content = example_content(LAYOUT, step=step)
        write_checkpoint(
            run / f"step-{step:08d}", LAYOUT, weights_of(content) if step in weights else content
        )
    name_latest(run, max(steps) if latest is None else latest)
    return run


def name_latest(run: Path, step: int, *superseded: int) -> None:
    name = f"step-{step:08d}"
    write_latest(run, Latest(name, (stated_checksum(run / name) or 0,)))
    mark_superseded([run / f"step-{number:08d}" for number in superseded])


@given(
    steps=st.sets(st.integers(0, 60), min_size=1).map(list),
    keep_last=st.none() | st.integers(1, 20),
    keep_every=st.none() | st.integers(1, 9),
    kept=st.none() | st.sets(st.integers(0, 60)),
    damaged=st.sets(st.integers(0, 60)),
    data=st.data(),
)
def test_what_goes_and_what_stays(
    steps: list[int],
    keep_last: int | None,
    keep_every: int | None,
    kept: set[int] | None,
    damaged: set[int],
    data: st.DataObject,
) -> None:
    newest = data.draw(st.sampled_from(steps))
    damaged.discard(newest)

    def gone_of(steps: list[int], retention: Retention) -> list[int]:
        return retention.removed(steps, newest, lambda step: step not in damaged)

    retention = Retention(keep_last, keep_every, None if kept is None else kept.__contains__)
    gone = gone_of(steps, retention)
    stays = set(steps) - set(gone)
    assert gone == sorted(set(gone))
    assert set(gone) <= set(steps)

    def enough_after(step: int) -> bool:
        """Whether as many intact ones as were asked for come after it."""
        after = [s for s in steps if step < s <= newest and s not in damaged]
        return len(after) >= (keep_last or 1)

    for step in gone:
        assert keep_every is None or step % keep_every
        assert kept is None or step not in kept
        assert enough_after(step)
    for step in stays:
        spared = (keep_every is not None and step % keep_every == 0) or (kept is not None and step in kept)
        assert spared or not enough_after(step)
    # Nothing more goes when it is asked again, or more generously.
    assert gone_of(sorted(stays), retention) == []
    more = replace(retention, keep_last=(keep_last or 1) + data.draw(st.integers(0, 5)))
    assert set(gone_of(steps, more)) <= set(gone)


def test_impossible_numbers(tmp_path: Path) -> None:
    run, impossible = make_run(tmp_path / "run", 1, 2), (0, -1, True, 1.5, 10**30)
    for name, value in itertools.product(("keep_last", "keep_every"), impossible):
        with pytest.raises(UsageError, match=f"{name}={value}: expected an integer from 1 to "):
            zerokit.prune(run, **{name: value})  # type: ignore[arg-type]
    assert list_steps(run) == [1, 2]


def test_older_steps_go(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *range(1, 8))
    size = files.measured(run / "step-00000001")[0]
    found = zerokit.prune(run, keep_last=2, keep_every=3, keep=lambda step: step == 1, dry_run=True)
    assert [doomed.path.name for doomed in found.removed] == [f"step-0000000{n}" for n in (2, 4, 5)]
    assert found.bytes == 3 * size
    assert list_steps(run) == list(range(1, 8))
    assert zerokit.prune(run, keep_last=2, keep_every=3, keep=lambda step: step == 1).bytes == 3 * size
    assert sorted(path.name for path in run.iterdir()) == [
        "latest",
        *(f"step-0000000{n}" for n in (1, 3, 6, 7)),
    ]
    assert zerokit.prune(run).removed == ()
    assert zerokit.verify(run).intact


@pytest.mark.parametrize(
    ("count", "latest", "weights", "damaged", "superseded", "keep_last", "stays"),
    [
        # The newest whole step, and the one that `latest` names.
        (6, 3, (5, 6), (), (), 1, [3, 4, 6]),
        # Damaged steps do not count: a run whose last ones are damaged would lose those that are not.
        (7, 7, (), (3, 5, 6), (), 3, [2, 3, 4, 5, 6, 7]),
        (7, 7, (), (3, 5, 6), (), 2, [4, 5, 6, 7]),
        # Superseded ones go, and later ones that are damaged stay: they may be out of reach for a moment.
        (7, 3, (), (6, 7), (4, 5), 2, [2, 3, 6, 7]),
    ],
)
def test_which_steps_count(
    tmp_path: Path,
    count: int,
    latest: int,
    weights: Any,
    damaged: Any,
    superseded: Any,
    keep_last: int,
    stays: Any,
) -> None:
    run = make_run(tmp_path / "run", *range(1, count + 1), weights=weights, latest=latest)
    name_latest(run, latest, *superseded)
    for step in damaged:
        (run / f"step-0000000{step}" / "extra.json").unlink()
    zerokit.prune(run, keep_last=keep_last)
    assert list_steps(run) == stays
    assert weights or zerokit.Checkpoint(run).step == latest


def test_a_save_leaves_superseded_steps_until_it_has_passed_them(tmp_path: Path) -> None:
    """Who forgot to go on from a run has not lost it with the first save."""
    run = make_run(tmp_path / "run", *range(1, 7))
    name_latest(run, 3, 4, 5, 6)
    prune_after_save(run, Retention(keep_last=1))
    assert list_steps(run) == [3, 4, 5, 6]
    make_run(run, 8)
    for step in (7, 9):
        write_checkpoint(run / f"step-0000000{step}", LAYOUT, example_content(LAYOUT, step=step))
    later = steps_to_supersede(run, "step-00000007")
    assert [path.name[-1] for path in later] == ["8", "9"]
    mark_superseded([*later, *later])  # by another job, too
    name_latest(run, 7)
    assert not steps_to_supersede(run, "step-00000007")
    prune_after_save(run, Retention(keep_last=2))
    assert list_steps(run) == [3, 7, 8, 9]


def test_a_prune_beside_this_one(tmp_path: Path) -> None:
    """What one has removed, the other need not."""
    run = make_run(tmp_path / "run", 1, 2, 3)

    class Beside(files.System):
        def rename(self, old: Path, new: Path) -> None:
            files.remove_tree(old)
            super().rename(old, new)

    with files.replaced(Beside()):
        prune_after_save(run, Retention(keep_last=1))
    assert list_steps(run) == [3]
    found = [Choice(run / "step-00000001", run), find_step(run)]
    with patch("zerokit.checkpoint.verify.find_step", side_effect=found):  # the first was the newest
        assert zerokit.verify(run).path == run / "step-00000003"
    assert foreign_to_step(run / "step-00000001") == "no manifest.json of zerokit's"
    with patch("zerokit.checkpoint.run.stated_checksum", return_value=1):  # it goes just then
        assert foreign_to_step(run / "step-00000001") == ""


def test_without_latest_nobody_knows_which_steps_are_superseded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *range(1, 7))
    (run / "latest").write_text("damaged")
    with pytest.raises(CheckpointError, match="latest: damaged"):
        zerokit.prune(run, keep_last=1)
    with pytest.raises(CheckpointError, match="latest: damaged"):  # of which a save makes a warning
        prune_after_save(run, Retention(keep_last=1))
    assert list_steps(run) == list(range(1, 7))


def test_what_is_no_step_of_zerokits_is_not_touched(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1, 2, 3, 4, 5)
    elsewhere = make_run(tmp_path / "elsewhere", 9) / "step-00000009"
    (run / "step-00000001").rename(tmp_path / "moved")
    (run / "step-00000001").symlink_to(tmp_path / "moved")
    (run / "step-00000002" / "mine.txt").touch()
    elsewhere.rename(run / "step-000000003")  # a number of nine digits
    for name in ("step-3", "best", "step-00000004.to-2", ".out.tmp-mine"):
        (run / name).mkdir()
    before = sorted(path.name for path in run.iterdir())
    found = zerokit.prune(run, keep_last=1)
    assert [doomed.path.name for doomed in found.removed] == ["step-00000003", "step-00000004"]
    assert found.left == (
        (run / "step-00000002", "holds the file 'mine.txt', which zerokit has not written there"),
    )
    assert sorted({path.name for path in run.iterdir()} | {"step-00000003", "step-00000004"}) == before
    assert (tmp_path / "moved" / "manifest.json").exists()


def test_what_cannot_be_removed_is_told(tmp_path: Path) -> None:
    leave_work(tmp_path, ended_process())

    class Denied(files.System):
        def unlink(self, path: Path, *, folder: int | None = None) -> None:
            raise PermissionError

    with (
        files.replaced(Denied()),
        pytest.raises(CheckpointError, match=r"abcdef: cannot be removed: check its permissions"),
    ):
        zerokit.prune(tmp_path)


def test_the_command_says_what_it_does(tmp_path: Path) -> None:
    gone = ended_process()
    run = make_run(tmp_path / "run", 1, 2, 3)
    size = decimal_size(files.measured(run / "step-00000001")[0])
    killed = leave_work(run, gone, "step-00000004")
    living = leave_work(run, Process.current(), "step-00000004")
    before = sorted(run.iterdir())
    would = command(tmp_path, "prune", "run", "--keep-last", "2", "--dry-run")
    assert (would.returncode, would.stderr) == (0, "")
    assert sorted(run.iterdir()) == before
    assert would.stdout.splitlines()[:2] == [
        f"would remove run/{killed.name}: 4 bytes; left by process {gone.pid} on {gone.host}, which is gone",
        f"would remove run/step-00000001: {size}",
    ]
    done = command(tmp_path, "prune", "run", "--keep-last", "2")
    assert done.stdout.splitlines() == [
        f"removed run/{killed.name}: 4 bytes; left by process {gone.pid} on {gone.host}, which is gone",
        f"removed run/step-00000001: {size}",
        f"left run/{living.name}: process {os.getpid()} on {gone.host} is writing it",
        f"run: {size} freed",
    ]
    assert sorted(run.iterdir()) == sorted({*before} - {killed, run / "step-00000001"})
    again = json.loads(command(tmp_path, "prune", "run", "--keep-last", "2", "--json").stdout)
    reason = f"process {os.getpid()} on {gone.host} is writing it"
    left = [{"path": f"run/{living.name}", "reason": reason}]
    assert again == {"run": "run", "dry_run": False, "bytes": 0, "removed": [], "left": left}
