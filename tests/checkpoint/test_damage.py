"""Damage anywhere in a checkpoint: whatever reads it says so by the name of the file, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerokit
from tests.support.checkpoints import example_content, example_layout, flip, write_checkpoint, write_run
from tests.support.crashes import Unsynced
from zerokit import files
from zerokit.checkpoint.reader import Checkpoint
from zerokit.errors import CheckpointError

RANK = "rank-00001-of-00003.safetensors"


def read_all(step: Path) -> None:
    checkpoint = Checkpoint(step)
    for rank in range(checkpoint.world):
        with checkpoint.open_file(rank):
            pass
    for stream in checkpoint.streams:
        for place in stream.parameters:
            checkpoint.read(stream.kind, checkpoint.names[place])
    for name in checkpoint.common_forms:
        checkpoint.common_tensor(name)
    checkpoint.extra()


def verify(step: Path) -> None:
    if findings := zerokit.verify(step).findings:
        raise CheckpointError(f"{findings[0].file}: {findings[0].problem}")


def reshard(step: Path) -> None:
    shutil.rmtree(zerokit.reshard(step, 2, step.with_name("out"), jobs=1))


def consolidate(step: Path) -> None:
    shutil.rmtree(zerokit.consolidate(step, step.with_name("out"), jobs=1))


READERS = [read_all, verify, reshard, consolidate]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of three ranks; another one beside it, whose files are not this one's."""
    folder, layout = tmp_path_factory.mktemp("damaged"), example_layout(3)
    write_checkpoint(folder / "other", layout, example_content(layout, step=101))
    return write_run(folder / "run", layout, example_content(layout))


def refused(step: Path, reader: Callable[[Path], None], message: str) -> None:
    with files.replaced(Unsynced()), pytest.raises(CheckpointError, match=message):
        reader(step)
    assert sorted(path.name for path in step.parent.iterdir()) == ["latest", step.name]


@settings(max_examples=60)
@given(data=st.data())
def test_a_flipped_bit_has_one_finding_with_its_place(step: Path, data: st.DataObject) -> None:
    """In every file; in data, with the slice."""
    path = data.draw(st.sampled_from(sorted(step.iterdir())))
    checkpoint, rank = Checkpoint(step), path.name[5:10] if path.name.startswith("rank-") else ""
    extents = checkpoint.rank_file(int(rank)).extents if rank else ()
    starts = [extent.offset for extent in extents] or [0]
    place = data.draw(st.sampled_from(starts) | st.integers(0, path.stat().st_size - 1))
    whole = flip(path, place)
    try:
        (found,) = zerokit.verify(step).findings
    finally:
        path.write_bytes(whole)
    assert found.file == path.name
    hit = [extent for extent in extents if extent.offset <= place < extent.offset + extent.size]
    wanted = [
        (checkpoint.streams[e.stream].kind, checkpoint.names[e.position], e.interval.start, e.interval.stop)
        for e in hit
    ]
    assert (found.stream, found.parameter, found.start, found.stop) == (*wanted, (None,) * 4)[0]


@settings(max_examples=150)
@given(data=st.data())
def test_a_flipped_bit_is_found_and_its_file_named(step: Path, data: st.DataObject) -> None:
    reader = data.draw(st.sampled_from(READERS))
    path = data.draw(st.sampled_from(sorted(step.iterdir())))
    if reader is consolidate and path.name == "extra.json":
        return  # not read
    first, last = 0, path.stat().st_size - 1
    if reader is consolidate and path.name.startswith("rank-"):  # nor are optimizer states
        checkpoint = Checkpoint(step)
        file = checkpoint.rank_file(int(path.name[5:10]))
        read = [e for e in file.extents if checkpoint.streams[e.stream].kind in ("master", "param")]
        extent = data.draw(st.sampled_from(read))
        first, last = extent.offset, extent.offset + extent.size - 1
    whole = flip(path, data.draw(st.integers(first, last)), 1 << data.draw(st.integers(0, 7)))
    try:
        refused(step, reader, path.name)
    finally:
        path.write_bytes(whole)


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 1), "truncated: .* bytes, expected"),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 1), "too long: .* bytes, expected"),
    "missing": (Path.unlink, "cannot be opened: No such file"),
    "a directory": (replaced_by(Path.mkdir), "not a regular file"),
    "a pipe": (replaced_by(os.mkfifo), "not a regular file"),
}


@pytest.mark.parametrize("name", [RANK, "common.safetensors", "extra.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_missing_or_wrong_file_is_named(tmp_path: Path, step: Path, name: str, damage: str) -> None:
    shutil.copytree(step.parent, tmp_path / "run")
    change, message = DAMAGES[damage]
    change(tmp_path / "run" / step.name / name)
    for reader in READERS:
        if reader is not consolidate or name != "extra.json":
            refused(tmp_path / "run" / step.name, reader, f"{name}: {message}")


def test_a_file_of_another_step_is_told_from_a_damaged_one(tmp_path: Path, step: Path) -> None:
    shutil.copytree(step.parent, tmp_path / "run")
    shutil.copy(step.parents[1] / "other" / RANK, tmp_path / "run" / step.name)
    for reader in READERS:
        refused(
            tmp_path / "run" / step.name, reader, f"{RANK}: .*of another checkpoint .step '101', not '100'"
        )
