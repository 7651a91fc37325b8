"""After a crash, or a fault of the disk, at any call the newest step is whole and the next save works."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import zerokit
from tests.support.checkpoints import example_content, example_layout, write_run
from tests.support.crashes import (
    CALLS,
    SPACE,
    WAYS,
    Crash,
    Failing,
    Recording,
    Tree,
    Unsynced,
    begin_journal,
    crashes,
    read_tree,
    write_tree,
)
from tests.support.distributed import ROOT, run_alone, run_ranks
from tests.support.saving import How, newest_step, small_optimizer, train
from zerokit import files
from zerokit.checkpoint.bases import unreferenced
from zerokit.checkpoint.prune import Retention, prune_after_save
from zerokit.checkpoint.save import save
from zerokit.checkpoint.staging import finish_replacement, leftovers


@dataclass(frozen=True)
class Saves:
    """Steps that are there, and the save that is recorded."""

    before: tuple[int, ...]
    step: int
    how: How
    whole: bool = False
    """With states that are not cut."""


AGAIN, BY_RENAMES = How(overwrite=True), How(overwrite=True, exchanges=False)
SAVES = {
    "first": Saves((), 5, How()),
    "next": Saves((5,), 7, How()),
    "background": Saves((5,), 7, How(blocking=False)),
    "overwrite the newest": Saves((3, 5), 5, AGAIN),
    "overwrite the newest, by renames": Saves((3, 5), 5, BY_RENAMES),
    "overwrite an older one": Saves((3, 5, 6), 3, AGAIN),
    "overwrite an older one, by renames": Saves((3, 5, 6), 3, BY_RENAMES),
    "retention": Saves((1, 2, 3), 4, How(keep_last=2)),
    "retention in the background": Saves((1, 2, 3), 4, How(keep_last=1, blocking=False)),
    "a base, first": Saves((), 5, How(frozen="once")),
    "another base": Saves((1, 2), 4, How(frozen="once", keep_last=1)),
    "another base of that step": Saves((5,), 5, How(frozen="once", overwrite=True, exchanges=False)),
    "states that are not cut": Saves((1, 2), 4, How(keep_last=1), whole=True),
    "the same states once more": Saves((3, 5), 5, AGAIN, whole=True),
    "another base in the background": Saves((1, 2), 4, How(frozen="once", keep_last=2, blocking=False)),
}
OF_THREE = (
    *("next", "background", "overwrite the newest", "overwrite the newest, by renames", "retention"),
    *("another base", "another base in the background", "states that are not cut"),
)
CASES = [(3 if name in OF_THREE else 1, name) for name in SAVES]


def _record(folder: str, names: list[str]) -> None:
    rank = dist.get_rank()
    optimizers = {
        kind: small_optimizer(base=kind == "base", whole=kind == "whole") for kind in ("", "base", "whole")
    }
    for number, name in enumerate(names):
        optimizer = optimizers["base" if SAVES[name].how.frozen == "once" else "whole" * SAVES[name].whole]
        case, root, journal = SAVES[name], Path(folder, f"root-{number}"), Path(folder, f"journal-{number}")
        if rank == 0:
            root.mkdir()
        dist.barrier()
        with files.replaced(Unsynced()):
            for step in case.before:
                How(frozen=case.how.frozen).save(root / "run", optimizer, step)
                train(optimizer)
        if rank == 0:
            begin_journal(root, journal)
        dist.barrier()
        with files.replaced(Recording(root, journal, exchanges=case.how.exchanges)):
            case.how.save(root / "run", optimizer, case.step)
        dist.barrier()


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Path]:
    """The journals of all cases."""
    found: dict[tuple[int, str], Path] = {}
    for world in (1, 3):
        folder = tmp_path_factory.mktemp(f"of-{world}")
        names = [name for of, name in CASES if of == world]
        run_ranks(world, _record, str(folder), names)
        found |= {(world, name): folder / f"journal-{number}" for number, name in enumerate(names)}
    return found


class _Places:
    """Fresh directories, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0

    def made(self, tree: Tree) -> Path:
        self._number += 1
        root = self._folder / f"tree-{self._number}"
        write_tree(tree, root)
        return root


def _require_tidy(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert not [left.path.name for left in leftovers(run) if left.gone]
    assert all(name == "latest" or name.startswith(("step-", "frozen-")) for name in names), names
    assert not unreferenced(run)


def _survives(folder: str, journal: str, name: str) -> int:
    """The number of states that were looked at."""
    case, places = SAVES[name], _Places(Path(folder))
    optimizer = small_optimizer(base=case.how.frozen == "once", whole=case.whole)
    states = list(crashes(Path(journal)))
    old, new = (newest_step(places.made(state.tree) / "run") for state in (states[0], states[-1]))
    assert old != new
    assert new is not None
    with files.replaced(Unsynced()):
        for state in states:
            try:
                _survives_one(case, state, places, optimizer, old, new)
            except BaseException as error:
                error.add_note(f"{name}: {state}")
                raise
    return len(states)


def _survives_one(
    case: Saves,
    state: Crash,
    places: _Places,
    optimizer: zerokit.ZeroOptimizer,
    old: tuple[int, int] | None,
    new: tuple[int, int],
) -> None:
    newest = newest_step(places.made(state.tree) / "run")
    assert newest in (old, new)
    assert newest == new or state.calls < state.total
    # Nobody has read the run before it is saved into: what a reader would finish, a writer has to. Calls and ways take
    # turns with a later step and with the same save once more, by a training that has gone on from the newest step.
    run = places.made(state.tree) / "run"
    again = (state.calls + WAYS.index(state.way)) % 2 and (newest != new or case.how.overwrite)
    step, how = (case.step, case.how) if again else (9, How())
    how.save(run, optimizer, step)
    _require_tidy(run)
    found = newest_step(run)
    assert found is not None
    assert found[0] == step
    assert again or newest is None or zerokit.verify(run / f"step-{newest[0]:08d}").intact


@pytest.mark.full(
    default=["3-next", "3-background", "3-overwrite the newest", "3-retention", "3-states*", "3-another base"]
)
@pytest.mark.parametrize(("world", "name"), CASES, ids=str)
def test_a_crash_of_a_save_leaves_the_old_or_the_new_step(
    world: int, name: str, journals: dict[tuple[int, str], Path], tmp_path: Path
) -> None:
    (states,) = run_ranks(1, _survives, str(tmp_path), str(journals[world, name]), name)
    assert states > 20


RESHARD = partial(zerokit.reshard, world=2, jobs=1)
CONSOLIDATE = partial(zerokit.consolidate, max_shard_size="20KB", jobs=1)


def _out(root: Path) -> Tree | None:
    """The output, once what a killed writer has begun is finished."""
    finish_replacement(root / "out")
    return read_tree(root / "out") if (root / "out").exists() else None


def _recorded(root: Path, journal: Path, exchanges: bool, work: Callable[[], object]) -> None:
    begin_journal(root, journal)
    with files.replaced(Recording(root, journal, exchanges=exchanges)):
        work()


@pytest.fixture
def unsynced() -> Iterator[None]:
    with files.replaced(Unsynced()):
        yield


@pytest.mark.parametrize(
    ("convert", "force", "exchanges"),
    [(RESHARD, False, True), (RESHARD, True, True), (CONSOLIDATE, True, False)],
)
def test_a_crash_of_a_conversion_leaves_the_old_or_the_new_output(
    convert: Callable[..., Path], force: bool, exchanges: bool, tmp_path: Path, unsynced: None
) -> None:
    places, runs = _Places(tmp_path), [tmp_path / f"run-{seed}" for seed in (0, 1)]
    for seed, run in enumerate(runs):
        write_run(run, example_layout(1), example_content(example_layout(1), seed=seed))
    (root := tmp_path / "root").mkdir()
    if force:
        convert(runs[0], output=root / "out")
    old = _out(root)
    # In another process: what it has left is nobody's when the tree is looked at.
    work = partial(convert, runs[1], output=root / "out", force=force)
    run_alone(_recorded, root, tmp_path / "journal", exchanges, work)
    new = _out(root)
    assert new != old
    for state in crashes(tmp_path / "journal"):
        found = _out(places.made(state.tree))
        assert found in (old, new), str(state)
        assert found == new or state.calls < state.total, str(state)
        root = places.made(state.tree)
        convert(runs[1], output=root / "out", force=found is not None)
        assert read_tree(root / "out") == new, str(state)
        assert [path.name for path in root.iterdir()] == ["out"], str(state)


def test_a_crash_of_prune_leaves_whole_steps(tmp_path: Path, unsynced: None) -> None:
    places, root = _Places(tmp_path), tmp_path / "root"
    for step in (10, 20, 30):
        write_run(root / "run", example_layout(1), example_content(example_layout(1), step=step))
    work = partial(prune_after_save, root / "run", Retention(keep_last=1))
    run_alone(_recorded, root, tmp_path / "journal", True, work)
    for state in crashes(tmp_path / "journal"):
        run = places.made(state.tree) / "run"
        newest, steps = newest_step(run), list(run.glob("step-*"))
        assert newest is not None, str(state)
        assert newest[0] == 30, str(state)
        assert all(zerokit.verify(step).intact for step in steps), str(state)
        assert len(steps) == 1 or state.calls < state.total, str(state)
        prune_after_save(run, Retention(keep_last=1))
        assert [path.name for path in run.glob("step-*")] == ["step-00000030"], str(state)


@dataclass(frozen=True)
class Fault:
    """Once, or from there on for the calls of these names."""

    code: int = errno.EIO
    lasting: tuple[str, ...] = ()


FAULTY = {
    "first, EIO once": (How(), Fault()),
    "background, full from there on": (How(blocking=False), Fault(errno.ENOSPC, SPACE)),
    "overwrite by renames, EIO once": (How(overwrite=True, exchanges=False), Fault()),
    "retention, EIO from there on": (How(keep_last=1), Fault(lasting=CALLS)),
    "another base, EIO once": (How(keep_last=1, frozen="once"), Fault()),
}


def _faults(folder: str, how: How, fault: Fault) -> list[int]:
    """One fault after the other in one training: at every fourth call of rank 0, then at every second of rank 1."""
    rank, met = dist.get_rank(), []
    optimizer = small_optimizer(base=how.frozen == "once")
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


@pytest.mark.parametrize("case", FAULTY)
def test_a_fault_of_the_disk_is_everybodys_and_the_next_save_works(case: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, _faults, str(tmp_path), *FAULTY[case])
    assert first == second
    assert first[0] > 20
    assert first[1] > 3


def test_nothing_is_lost_in_a_round() -> None:
    """A round of scripts/crash-rounds, which kills real processes."""
    words = ["--kind", "background", "--rounds", "1", "--seed", "5", "--json"]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "crash_rounds.py", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["kills_of_one"] + report["kills_of_all"] == 1
    assert report["saves"] > 0
    faults = ("lost_steps", "blocked_resumes", "damaged_steps", "left_behind", "unclear_ends")
    assert [report[fault] for fault in faults] == [0] * 5
