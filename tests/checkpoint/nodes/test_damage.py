"""Damage in nodes' directories: what is wrong is refused, named, and taken from another node with equal bits."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zerokit
from tests.support.checkpoints import flip
from tests.support.distributed import AT_ONCE, run_ranks
from tests.support.nodes import Kind, Training, place
from tests.support.saving import in_turn
from zerokit.checkpoint.run import step_name

NEW, OLD = step_name(4), step_name(2)


class Damaged:
    """A training on a node for each rank, with steps 2 and 4, which all ranks look at, and rank 0 damages."""

    def __init__(self, folder: str, kind: str = "muon", copies: int = 2) -> None:
        self.folder = folder
        self.training = Training(Kind(classes=kind))
        self.own = self.run(dist.get_rank())
        self.right: dict[int, str] = {}
        for first in (0, 2):
            self.training.train(first, first + 2)
            self.training.save(self.own, first + 2, shared=False, copies=copies)
            self.note(first + 2)
        dist.barrier()

    def note(self, step: int) -> None:
        """What the training has now is right of that step."""
        self.right[step] = self._bits(step)

    def _bits(self, step: int) -> str:
        return self.training.bits(Path(self.folder, "scratch"), step)

    def run(self, node: int) -> Path:
        return place(self.folder, node)

    def files(self, step: str = NEW) -> list[Path]:
        return sorted(
            path for node in range(dist.get_world_size()) for path in (self.run(node) / step).iterdir()
        )

    def load(self, damage: Callable[[], Callable[[], object]], places: Any = None) -> tuple[int, str]:
        """Load with a damage that rank 0 does and takes back; the step, and the warning on rank 0."""
        rank, undo = dist.get_rank(), None
        dist.barrier()
        if rank == 0:
            undo = damage()
        dist.barrier()
        extra, said = self.training.load(places or [self.own])
        assert self._bits(extra["step"]) == self.right[extra["step"]], extra
        assert len(said) <= (rank == 0)
        dist.barrier()
        if undo is not None:
            undo()
        dist.barrier()
        return extra["step"], said[0] if said else ""


def flipped(path: Path, offset: int, bit: int) -> Callable[[], Callable[[], object]]:
    def damage() -> Callable[[], object]:
        whole = flip(path, offset, 1 << bit)
        return lambda: path.write_bytes(whole)

    return damage


def together(*damages: Callable[[], Callable[[], object]]) -> Callable[[], Callable[[], object]]:
    def damage() -> Callable[[], object]:
        undo = [one() for one in damages]
        return lambda: [one() for one in reversed(undo)]

    return damage


def flips(folder: str, count: int, seed: int = 0) -> None:
    """Bytes anywhere: the step comes from the other holder. The same file hit on both: the older step."""
    damaged, choose, rank = Damaged(folder), random.Random(seed), dist.get_rank()
    named = older = 0
    for number in range(count):
        path = choose.choice(damaged.files())
        size, bit = path.stat().st_size, choose.randrange(8)
        data = path.name.startswith(("rank-", "state")) and number % 2 == 0  # not its header
        offset = choose.randrange(4096 if data else 0, size)
        step, text = damaged.load(flipped(path, offset, bit))
        assert step == 4, (path, offset, text)
        named += bool(text)
        if data:
            both = [each for each in damaged.files() if each.name == path.name]
            assert len(both) == 2
            step, text = damaged.load(together(*(flipped(each, offset, bit) for each in both)))
            older += step == 2
            assert step == 4 or rank or "damaged on every node that has it" in text, (path, offset, text)
    if rank == 0:
        assert named > count // 8
        assert older > count // 40, older


def _flips(folder: str) -> None:
    flips(folder, 30)


def _damage_of_every_kind_of_file(folder: str) -> None:
    damaged, rank = Damaged(folder), dist.get_rank()

    def expect(step: int, words: str, *damages: Callable[[], Callable[[], object]]) -> None:
        found, text = damaged.load(together(*damages))
        assert found == step, text
        if rank == 0:
            assert words in text, text
            assert bool(words) == bool(text), text

    def cut(path: Path, size: int) -> Callable[[], Callable[[], object]]:
        def damage() -> Callable[[], object]:
            whole = path.read_bytes()
            os.truncate(path, size)
            return lambda: path.write_bytes(whole)

        return damage

    def replaced(path: Path, make: Callable[[Path], object]) -> Callable[[], Callable[[], object]]:
        def damage() -> Callable[[], object]:
            aside = path.parents[2] / "aside"  # of its node
            path.rename(aside)
            make(path)

            def undo() -> None:
                if path.exists() or path.is_symlink():
                    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
                aside.rename(path)

            return undo

        return damage

    steps = [damaged.run(node) / NEW for node in range(3)]
    by_name: dict[str, list[Path]] = {}
    for path in damaged.files():
        by_name.setdefault(path.name, []).append(path)
    wholes = {"manifest.json", "node.json", "common.safetensors", "extra.json"}
    for name, paths in by_name.items():
        assert len(paths) == (3 if name in wholes else 2), name
        ways: list[Callable[[Path], Callable[[], Callable[[], object]]]] = [
            lambda path: cut(path, path.stat().st_size // 2),
            lambda path: cut(path, 0),
            lambda path: replaced(path, lambda p: None),
            lambda path: replaced(path, Path.mkdir),
            lambda path: replaced(path, os.mkfifo),
            lambda path: replaced(path, lambda p: p.symlink_to("/nowhere")),
        ]
        # What takes a file's place is looked at before what is in it: the same for all ranks' files.
        for way in ways if name in wholes or name.startswith("rank-00000") else ways[:3]:
            found, text = damaged.load(way(paths[0]))
            assert found == 4, (name, text)
            if name not in wholes:
                found, text = damaged.load(together(*map(way, paths)))
                assert found == 2, (name, text)
                assert rank or f"{name}" in text or "missing" in text, text
    for name in ("common.safetensors", "extra.json"):
        expect(2, f"{name}: damaged on every node", *(flipped(step / name, 20, 1) for step in steps))
        expect(4, "", flipped(steps[0] / name, 20, 1), flipped(steps[1] / name, 20, 1))
    # Manifests of all nodes: nothing of the step is known.
    expect(2, "manifest.json", *(flipped(step / "manifest.json", 90, 1) for step in steps))
    expect(4, "manifest.json", *(flipped(step / "manifest.json", 90, 1) for step in steps[:1]))
    expect(4, "node.json", *(flipped(step / "node.json", 90, 1) for step in steps))


def _in_both_steps(folder: str) -> None:
    """Nothing is left: an error on every rank, and no step until a load succeeds; then the next place."""
    damaged = Damaged(folder, "adamw")
    damaged.training.save(Path(folder, "shared"), 1, extra={"step": 1})
    damaged.note(1)
    names = [
        each for step in (NEW, OLD) for each in damaged.files(step) if each.name.startswith("rank-00001")
    ]
    assert len(names) == 4
    everything = together(*(flipped(path, path.stat().st_size - 1, 1) for path in names))
    step, text = damaged.load(everything, [damaged.own, Path(folder, "shared")])
    assert step == 1
    if dist.get_rank() == 0:
        assert "step 1 is loaded" in text
        assert f"{NEW}: damaged on every node that has it: " in text
        assert f"{OLD}: damaged on every node that has it: " in text
    undo = everything() if dist.get_rank() == 0 else None
    dist.barrier()
    with pytest.raises(
        zerokit.CheckpointError, match=r"no step that is complete and undamaged: .*rank-00001"
    ):
        zerokit.load([damaged.own], damaged.training.optimizer)
    with pytest.raises(zerokit.ZerokitError, match="did not succeed, so the state is incomplete"):
        damaged.training.step(4)
    damaged.training.optimizer.zero_grad()
    dist.barrier()
    if undo is not None:
        undo()
    assert damaged.load(lambda: lambda: None) == (4, "")
    damaged.training.step(4)


def _generations_and_other_runs(folder: str) -> None:
    rank = dist.get_rank()
    damaged = Damaged(folder)
    training = damaged.training
    # A node that was away has the step before, and misses the newest.
    training.train(4, 6)
    training.save(damaged.own, 6, shared=False)
    damaged.note(6)
    dist.barrier()

    def behind() -> Callable[[], object]:
        aside = Path(folder, "aside")
        (damaged.run(1) / step_name(6)).rename(aside)
        return lambda: aside.rename(damaged.run(1) / step_name(6))

    assert damaged.load(behind) == (6, "")

    # Two nodes that are: it is not complete.
    def two_behind() -> Callable[[], object]:
        undo = behind()
        aside = Path(folder, "aside-2")
        (damaged.run(2) / step_name(6)).rename(aside)

        def both() -> None:
            undo()
            aside.rename(damaged.run(2) / step_name(6))

        return both

    step, text = damaged.load(two_behind)
    assert step == 4
    assert rank or "step 6 is incomplete" in text
    # Another training of the same model, which is further on, was on one node before.
    other = Training(Kind(classes="muon"))
    other.train(0, 9)
    elsewhere = place(f"{folder}/other", rank)
    other.save(elsewhere, 9, shared=False)
    dist.barrier()
    training.load([damaged.own])
    training.train(6, 8)
    training.save(damaged.own, 8, shared=False)
    damaged.note(8)

    def foreign() -> Callable[[], object]:
        moved = damaged.run(0) / step_name(9)
        shutil.copytree(place(f"{folder}/other", 0) / step_name(9), moved)
        return lambda: shutil.rmtree(moved)

    step, text = damaged.load(foreign)
    assert step == 8
    assert rank or "step 9 is of another training" in text


def _other_users(folder: str) -> None:
    rank = dist.get_rank()
    damaged = Damaged(folder)
    run = damaged.run(1)

    def mode(bits: int, path: Path = run, before: int = 0o700) -> Callable[[], Callable[[], object]]:
        def damage() -> Callable[[], object]:
            path.chmod(bits)
            return partial(path.chmod, before)

        return damage

    def owned() -> Callable[[], object]:
        os.chown(run, 12345, 12345)
        return partial(os.chown, run, 0, 0)

    def linked() -> Callable[[], object]:
        aside = run.with_name("aside")
        run.rename(aside)
        run.symlink_to(aside)

        def undo() -> None:
            run.unlink()
            aside.rename(run)

        return undo

    def above(bits: int) -> Callable[[], Callable[[], object]]:
        return mode(bits, run.parent, 0o755)

    def on_the_way() -> Callable[[], object]:
        """Another user's directory in one to which all may write, with this user's in it."""
        os.chown(run.parent, 12345, -1)
        before = run.parent.parent.stat().st_mode
        run.parent.parent.chmod(0o1777)

        def undo() -> None:
            run.parent.parent.chmod(before)
            os.chown(run.parent, os.geteuid(), -1)

        return undo

    cases = [
        (mode(0o777), "can be written to by others (mode 0777)"),
        (mode(0o770), "can be written to by others"),
        (linked, "is a link"),
        (above(0o777), "can be replaced by anybody"),
    ]
    if os.geteuid() == 0:
        cases += [(owned, "is user 12345's"), (on_the_way, "which is user 12345's, in")]
    for damage, words in cases:
        step, text = damaged.load(damage)
        assert step == 4
        assert rank or (f"rank 1: {run}: " in text and words in text), text
        undo = damage() if rank == 0 else None
        dist.barrier()
        with pytest.raises(zerokit.CheckpointError, match=r"rank 1: .*what others can change is not trusted"):
            damaged.training.save(damaged.own, 6, shared=False)
        dist.barrier()
        if undo is not None:
            undo()
        dist.barrier()
    for fine in (mode(0o755), above(0o1777)):
        assert damaged.load(fine) == (4, "")


def _manifests_of_neighbours(folder: str) -> None:
    """Files beside a damaged manifest are read by another node's: both holders of a file may have one."""
    damaged, rank = Damaged(folder), dist.get_rank()
    manifests = [damaged.run(node) / NEW / "manifest.json" for node in range(3)]
    for pair in ((0, 1), (1, 2), (2, 0)):
        step, text = damaged.load(together(*(flipped(manifests[node], 100, 1) for node in pair)))
        assert step == 4
        assert rank or all(str(manifests[node]) in text for node in pair), text
    records = [damaged.run(node) / NEW / "node.json" for node in range(3)]
    step, _ = damaged.load(together(flipped(manifests[0], 100, 1), *(flipped(one, 50, 1) for one in records)))
    assert step == 4
    step, _ = damaged.load(together(*(flipped(one, 100, 1) for one in manifests)))
    assert step == 2


WORKS: list[Callable[[str], None]] = [
    _manifests_of_neighbours,
    _flips,
    _damage_of_every_kind_of_file,
    _in_both_steps,
    _generations_and_other_runs,
    _other_users,
]


@pytest.mark.full(default=["_damage_*", "_in_both_*", "_other_users", "_manifests_*"])
@pytest.mark.parametrize("work", WORKS)
def test_damage(tmp_path: Path, work: Any) -> None:
    run_ranks(3, in_turn, [work], str(tmp_path), **AT_ONCE)
