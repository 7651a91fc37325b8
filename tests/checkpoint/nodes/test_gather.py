"""`gather` writes what a save into a shared directory would have, from whatever directories have it undamaged."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zerokit
from tests.support.checkpoints import Content, example_content, example_layout, flip, write_run
from tests.support.dealt import contents, deal
from tests.support.distributed import run_ranks
from tests.support.nodes import Kind, Training, place
from zerokit.checkpoint.manifest import NAME, read_manifest
from zerokit.checkpoint.nodes.joined import Joined
from zerokit.checkpoint.nodes.record import NODE_NAME, read_record
from zerokit.checkpoint.safetensors import RankFile
from zerokit.errors import CheckpointError, MissingPath, StorageError, UsageError


def other(step: int, seed: int = 1) -> Content:
    return example_content(example_layout(1), step=step, seed=seed)


@pytest.mark.parametrize("chosen", [(0, 1, 2, 3), (3, 1), (0, 2), (2, 1, 0)])
def test_any_nodes_that_have_all_files_make_the_run(
    step: Path, nodes: list[Path], tmp_path: Path, chosen: tuple[int, ...]
) -> None:
    done = zerokit.gather([nodes[number] for number in chosen], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(step.parent)
    assert (done.step, done.world, done.notes, done.mended) == (100, 8, (), ())
    assert done.path == tmp_path / "out" / step.name
    assert zerokit.verify(done.output).intact


def test_steps_are_directories_too_and_a_copy_of_all_in_one_place_is_enough(
    step: Path, nodes: list[Path], tmp_path: Path
) -> None:
    zerokit.gather([node / step.name for node in nodes], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(step.parent)
    for node in nodes[1:]:
        shutil.copytree(node, nodes[0], dirs_exist_ok=True)
    assert zerokit.verify(nodes[0]).intact
    zerokit.gather(str(nodes[0]), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(step.parent)
    assert zerokit.diff(nodes[0], tmp_path / "out").same


def _saved(root: str) -> None:
    """States that are not cut, in files of their own, on three nodes and in a shared run."""
    training = Training(Kind(classes="adafactor", base=True))
    training.train(0, 2)
    training.save(Path(root, "shared"), 2)
    training.save(place(root, dist.get_rank()), 2, shared=False, copies=2)


def test_a_training_s_nodes_make_the_run_that_a_shared_disk_would_have(tmp_path: Path) -> None:
    run_ranks(3, _saved, str(tmp_path))
    runs = [place(tmp_path, node) for node in range(3)]
    assert "states-" in "".join(contents(tmp_path / "shared"))
    for lost in range(3):
        left = [run for node, run in enumerate(runs) if node != lost]
        zerokit.gather(left, tmp_path / f"out-{lost}")
        assert contents(tmp_path / f"out-{lost}") == contents(tmp_path / "shared")
        assert zerokit.verify(left).intact
    zerokit.reshard(runs[1:], 2, tmp_path / "two")
    assert zerokit.diff(tmp_path / "shared", tmp_path / "two").same
    uncut = next(path for path in (runs[0] / "step-00000002").glob("states-*"))
    flip(uncut, -3)
    (other,) = {path for run in runs[1:] for path in run.rglob(uncut.name)}
    done = zerokit.gather(runs, tmp_path / "mended")
    assert contents(tmp_path / "mended") == contents(tmp_path / "shared")
    flip(other, -5)
    with pytest.raises(CheckpointError, match=f"{uncut.name}: damaged .* in every directory that has it"):
        zerokit.gather(runs, tmp_path / "lost")
    assert done.step == 2


def test_what_is_missing_is_said_with_the_nodes_that_have_it(nodes: list[Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        zerokit.gather(nodes[:2], tmp_path / "out")
    assert str(caught.value) == (
        f"{nodes[0]} and {nodes[1]}: no step that is complete: step 100 is incomplete: files of ranks 4 and 5 are "
        "missing: node 2 wrote them, nodes 2 and 3 have them: name the directories of those nodes too, or make one run "
        "of all with zerokit gather"
    )
    assert not (tmp_path / "out").exists()
    with pytest.raises(MissingPath, match="nowhere: does not exist"):
        zerokit.gather([*nodes, tmp_path / "nowhere"], tmp_path / "out")
    with pytest.raises(UsageError, match="no directory was given"):
        zerokit.gather([], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty: no step that is complete: give directories of steps"):
        zerokit.gather([tmp_path / "empty"], tmp_path / "out")


def test_an_older_step_is_taken_where_the_newest_is_incomplete(
    step: Path, nodes: list[Path], tmp_path: Path
) -> None:
    """A node was killed before its commit, and another one was replaced by an empty one."""
    newer = write_run(tmp_path / "newer", example_layout(8), other(110))
    for old, new in zip(nodes, deal(newer, tmp_path / "later", nodes=4, saved=2000), strict=True):
        shutil.copytree(new, old, dirs_exist_ok=True)
    zerokit.gather(nodes, tmp_path / "newest")
    assert contents(tmp_path / "newest") == contents(newer.parent)
    shutil.rmtree(nodes[1] / newer.name)
    shutil.rmtree(nodes[2] / newer.name)
    done = zerokit.gather(nodes, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(step.parent)
    assert done.notes == (
        "step 110 is incomplete: files of ranks 2 and 3 are missing: node 1 wrote them, nodes 1 and 2 have them",
    )


def test_a_stale_node_and_another_training_are_named(step: Path, tmp_path: Path, nodes: list[Path]) -> None:
    older = write_run(tmp_path / "older", example_layout(8), other(90))
    stale = deal(older, tmp_path / "stale", nodes=4, saved=900)[1]
    foreign = write_run(tmp_path / "foreign", example_layout(8), other(500))
    away = deal(foreign, tmp_path / "away", nodes=4, saved=10, run="f" * 32)
    done = zerokit.gather([nodes[0], stale, *away, nodes[2]], tmp_path / "out")
    assert contents(tmp_path / "out") == contents(step.parent)
    assert f"{stale}: has nothing of this save of step 100, only 90" in done.notes
    passed = "step 500 is of another training: it is passed over"
    assert f"{away[3]}/step-00000500: {passed}" in done.notes


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "name",
    [NAME, NODE_NAME, "rank-00000-of-00008.safetensors", "common.safetensors", "extra.json"],
)
def test_a_file_that_is_written_in_half_is_taken_from_another(
    step: Path, nodes: list[Path], tmp_path: Path, name: str
) -> None:
    half(nodes[0] / step.name / name)
    done = zerokit.gather(nodes, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(step.parent)
    if name not in (NAME, NODE_NAME):
        assert done.notes == (f"{nodes[0] / step.name}: {name} should be there, and is not whole",)
    else:
        assert f"{nodes[0] / step.name / name}: damaged" in done.notes[0] or "not a zerokit" in done.notes[0]


def test_a_record_of_another_save_makes_a_directory_useless(
    step: Path, nodes: list[Path], tmp_path: Path
) -> None:
    newer = write_run(tmp_path / "newer", example_layout(8), other(100, seed=9))
    wrong = deal(newer, tmp_path / "later", nodes=4)[0]
    shutil.copy(wrong / newer.name / NODE_NAME, nodes[0] / step.name)
    done = zerokit.gather(nodes, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(step.parent)
    assert "is of step 100 and the manifest" in done.notes[0]


def test_every_flipped_byte_is_mended_or_named(step: Path, nodes: list[Path], tmp_path: Path) -> None:
    """240 bytes anywhere in files and copies, six at a time."""
    generator, right = random.Random(54), contents(step.parent)
    every = sorted(path for node in nodes for path in node.rglob("*") if path.is_file())
    lost = 0
    for number in range(40):
        whole: dict[Path, bytes] = {}
        for path in generator.choices(every, k=6):
            before = flip(path, generator.randrange(path.stat().st_size), 1 << generator.randrange(8))
            whole.setdefault(path, before)
        try:
            done = zerokit.gather(nodes, tmp_path / f"out-{number}")
        except CheckpointError as error:
            told, lost = str(error), lost + 1
        else:
            told = ""
            assert contents(done.output) == right
        assert told == "" or "in every directory that has it" in told or "no step that is complete" in told
        for path, before in whole.items():
            path.write_bytes(before)
    assert lost < 3
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def slices_of(step: Path, rank: int) -> list[tuple[str, int, int]]:
    """The slices in a rank's file: kind and parameter, offset and size."""
    checkpoint = zerokit.Checkpoint(step)
    file = checkpoint.rank_file(rank)
    return [
        (
            f"{checkpoint.streams[e.stream].kind}/{checkpoint.layout.parameters[e.position].name}",
            e.offset,
            e.size,
        )
        for e in file.extents
    ]


def test_damage_in_both_copies_at_different_slices_is_mended(
    step: Path, nodes: list[Path], tmp_path: Path
) -> None:
    name = "rank-00000-of-00008.safetensors"
    slices = slices_of(step, 0)
    for number, (_, offset, size) in enumerate(slices):
        flip(nodes[number % 2] / step.name / name, offset + size // 2)
    flip(nodes[0] / step.name / name, 12)  # the header, which the manifest knows
    flip(nodes[1] / step.name / "common.safetensors", 5000 % (step / "common.safetensors").stat().st_size)
    done = zerokit.gather(nodes, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(step.parent)
    taken = "damaged: taken from another directory"
    assert f"{nodes[0] / step.name / name}: {taken}" in done.notes
    assert len(done.mended) == len(slices) // 2
    assert all(text.startswith(f"{nodes[1] / step.name}: {name}: ") for text in done.mended)
    assert all(text.endswith(f"taken from {nodes[0]}") for text in done.mended)


def test_a_slice_that_is_damaged_everywhere_is_named(step: Path, nodes: list[Path], tmp_path: Path) -> None:
    name = "rank-00000-of-00008.safetensors"
    what, offset, size = slices_of(step, 0)[1]
    for node, at in ((0, 0), (1, size - 1)):
        flip(nodes[node] / step.name / name, offset + at)
    with pytest.raises(CheckpointError) as caught:
        zerokit.gather(nodes, tmp_path / "out", force=True)
    assert f"{name}: {what}, elements 0 to " in str(caught.value)
    assert f"in every directory that has it ({nodes[0]} and {nodes[1]}): nothing was written" in str(
        caught.value
    )
    assert not (tmp_path / "out").exists()
    # What a truncated copy still has is as good as any.
    path = nodes[0] / step.name / name
    flip(path, offset)
    half(path)
    flip(nodes[1] / step.name / name, offset + size - 1)
    flip(nodes[1] / step.name / name, offset)
    done = zerokit.gather(nodes, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(step.parent)
    assert done.mended[0].endswith(f"taken from {nodes[0]}")


def test_a_file_that_cannot_be_read_is_taken_from_another(
    step: Path, nodes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk fails in the middle of a file."""
    bad = {
        nodes[0] / step.name / "rank-00000-of-00008.safetensors",
        nodes[1] / step.name / "common.safetensors",
    }
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        end = offset + sum(memoryview(buffer).nbytes for buffer in buffers)
        if end > 4096 and Path(f"/proc/self/fd/{fd}").resolve() in bad:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    done = zerokit.gather(nodes, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(step.parent)
    (told,) = done.mended
    assert (
        f"{nodes[0] / step.name}/rank-00000-of-00008.safetensors: cannot be read: Input/output error" in told
    )
    bad.add(nodes[1] / step.name / "rank-00000-of-00008.safetensors")
    with pytest.raises(StorageError, match="cannot be read: Input/output error"):
        zerokit.gather(nodes, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_step_that_goes_meanwhile_is_named(
    step: Path, nodes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a training that goes on saving."""
    place, real = nodes[0] / step.name, Joined.rank_file

    def rank_file(joined: Joined, rank: int) -> RankFile:
        shutil.rmtree(place, ignore_errors=True)
        (nodes[1] / step.name / "rank-00000-of-00008.safetensors").unlink(missing_ok=True)
        return real(joined, rank)

    monkeypatch.setattr(Joined, "rank_file", rank_file)
    with pytest.raises(
        CheckpointError, match="step-00000100: was removed while it was read: a training goes on"
    ):
        zerokit.gather(nodes, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_output_is_never_one_of_the_directories(step: Path, nodes: list[Path], tmp_path: Path) -> None:
    for output, message in (
        (nodes[2], "the output is the source itself"),
        (nodes[3] / "run", "the output lies in its source"),
        (tmp_path, "the output contains its source"),
        (step.parent, "exists: choose another output, or --force"),
    ):
        with pytest.raises(CheckpointError, match=message):
            zerokit.gather(nodes, output, force=output != step.parent)
    done = zerokit.gather(nodes, step.parent, force=True)
    assert zerokit.verify(done.output).intact


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    layout = example_layout(8)
    step = write_run(tmp_path / "run", layout, example_content(layout))
    nodes = deal(step, tmp_path, nodes=4)
    zerokit.gather(nodes, tmp_path / "first")  # imports
    tracemalloc.start()
    zerokit.gather(nodes, tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert read_manifest(nodes[0] / step.name)[0].world == 8
    assert read_record(nodes[0] / step.name) is not None
