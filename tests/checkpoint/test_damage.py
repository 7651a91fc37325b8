"""Damage anywhere in a checkpoint: `verify` names its place, and whatever else reads it the file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerokit
from tests.cli.inside import zerokit_inside as command
from tests.support.checkpoints import (
    coded,
    example_content,
    example_extra,
    example_layout,
    flip,
    sealed,
    write_checkpoint,
    write_run,
)
from tests.support.crashes import Unsynced
from tests.support.mutations import mutated
from zerokit import files
from zerokit.checkpoint.diff import diff
from zerokit.checkpoint.inspect import inspect
from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.verify import Finding, verify, verify_all
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


def reshard(step: Path) -> None:
    shutil.rmtree(zerokit.reshard(step, 2, step.with_name("out"), jobs=1))


def consolidate(step: Path) -> None:
    shutil.rmtree(zerokit.consolidate(step, step.with_name("out"), jobs=1))


READERS = [read_all, reshard, consolidate]


@pytest.fixture(scope="module", params=["numbers", "codes"])
def whole_step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of three ranks; another one beside it, whose files are not this one's."""
    folder, layout = tmp_path_factory.mktemp("damaged"), example_layout(3)
    one, other = example_content(layout), example_content(layout, step=101)
    if request.param == "codes":
        one, other = coded(one, layout), coded(other, layout)
    write_checkpoint(folder / "other", layout, other)
    return write_run(folder / "run", layout, one)


def refused(step: Path, reader: Callable[[Path], None], message: str) -> None:
    with files.replaced(Unsynced()), pytest.raises(CheckpointError, match=message):
        reader(step)
    assert sorted(path.name for path in step.parent.iterdir()) == ["latest", step.name]


@settings(max_examples=150)
@given(data=st.data())
def test_a_flipped_bit_has_one_finding_with_its_place(whole_step: Path, data: st.DataObject) -> None:
    """In every file; in data, with the slice. Whatever else reads that byte names the file."""
    path = data.draw(st.sampled_from(sorted(whole_step.iterdir())))
    checkpoint, rank = Checkpoint(whole_step), path.name[5:10] if path.name.startswith("rank-") else ""
    extents = checkpoint.rank_file(int(rank)).extents if rank else ()
    starts = [extent.offset for extent in extents] or [0]
    place = data.draw(st.sampled_from(starts) | st.integers(0, path.stat().st_size - 1))
    whole = flip(path, place, 1 << data.draw(st.integers(0, 7)))
    hit = [extent for extent in extents if extent.offset <= place < extent.offset + extent.size]
    wanted = [
        (checkpoint.streams[e.stream].kind, checkpoint.names[e.position], e.interval.start, e.interval.stop)
        for e in hit
    ]
    weights = wanted[0][0] in ("master", "param") if wanted else path.name != "extra.json"
    try:
        (found,) = zerokit.verify(whole_step).findings
        refused(whole_step, data.draw(st.sampled_from(READERS if weights else READERS[:-1])), path.name)
    finally:
        path.write_bytes(whole)
    assert found.file == path.name
    assert (found.stream, found.parameter, found.start, found.stop) == (*wanted, (None,) * 4)[0]


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
def test_a_missing_or_wrong_file_is_named(tmp_path: Path, whole_step: Path, name: str, damage: str) -> None:
    shutil.copytree(whole_step.parent, tmp_path / "run")
    change, message = DAMAGES[damage]
    change(tmp_path / "run" / whole_step.name / name)
    for reader in READERS:
        if reader is not consolidate or name != "extra.json":
            refused(tmp_path / "run" / whole_step.name, reader, f"{name}: {message}")


def test_a_file_of_another_step_is_refused(tmp_path: Path, whole_step: Path) -> None:
    shutil.copytree(whole_step.parent, tmp_path / "run")
    shutil.copy(whole_step.parents[1] / "other" / RANK, tmp_path / "run" / whole_step.name)
    for reader in READERS:
        refused(tmp_path / "run" / whole_step.name, reader, f"{RANK}: .*or the file is of another checkpoint")


WORLD = 3


@pytest.mark.parametrize("world", [1, 17])
def test_an_intact_checkpoint_has_no_finding_and_is_read_whole(tmp_path: Path, world: int) -> None:
    layout = example_layout(world)
    manifest = write_checkpoint(tmp_path / "step", layout, example_content(layout))
    seen: list[tuple[int, int]] = []
    report = verify(tmp_path / "step", lambda done, total: seen.append((done, total)))
    size = sum(path.stat().st_size for path in (tmp_path / "step").iterdir() if path.name != "manifest.json")
    assert report.intact
    assert (report.step, report.world, report.bytes_read) == (100, world, size)
    assert report.slices == sum(map(len, manifest.checksums))
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


def test_all_damage_is_told_at_once(step: Path) -> None:
    content = bytearray((step / RANK).read_bytes())
    checkpoint = Checkpoint(step)
    extents = checkpoint.rank_file(1).extents
    for extent in (extents[0], extents[-2]):
        content[extent.offset] ^= 255
    content[100] ^= 1  # the header
    (step / RANK).write_bytes(content[: extents[-1].offset + 1])
    (step / "rank-00000-of-00003.safetensors").unlink()
    (step / "common.safetensors").write_bytes(b"")
    (step / "extra.json").write_bytes(bytes((step / "extra.json").stat().st_size))
    (step / "rank-00003-of-00004.safetensors").touch()
    (step.parent / "latest").write_text(f"{step.name} 00000000\n")
    found = [
        (finding.file, finding.problem.split(":")[0].split(" (")[0])
        for finding in verify(step.parent).findings
    ]
    assert found == [
        ("latest", "states the manifest 00000000, step-00000100 has " + found[0][1][-8:]),
        ("rank-00003-of-00004.safetensors", "not a part of this checkpoint"),
        ("rank-00000-of-00003.safetensors", "cannot be opened"),
        (RANK, "truncated"),
        (RANK, "its header is damaged"),
        (RANK, "damaged"),
        (RANK, "damaged"),
        (RANK, "beyond the end of the file"),
        ("common.safetensors", "truncated"),
        ("extra.json", "damaged"),
    ]


def test_small_files_that_do_not_fit_the_manifest_are_told(tmp_path: Path) -> None:
    """Their checksums are right."""
    extra = example_extra(user={"$": "torch", "tensor": "x"})
    strange = replace(example_content(example_layout(1)), common=(), extra=extra)
    write_checkpoint(tmp_path / "step", example_layout(1), strange)
    common, rest = verify(tmp_path / "step").findings
    assert common == Finding("common.safetensors", "holds nothing as optimizer/step, expected float32 [14]")
    assert rest.file == "extra.json"
    assert "there is no such tensor" in rest.problem


@settings(max_examples=60)
@given(data=st.data())
def test_a_changed_manifest_with_a_right_checksum_is_survived(whole_step: Path, data: st.DataObject) -> None:
    """By everything that reads checkpoints; it may pass only if nothing that counts was changed."""
    manifest = whole_step / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(sealed(mutated(json.loads(whole), data)))
    try:
        report = verify(whole_step)
        assert report.intact or all(finding.file for finding in report.findings)
        with contextlib.nullcontext() if report.intact else contextlib.suppress(CheckpointError):
            checkpoint = Checkpoint(whole_step)
            for name in checkpoint.names:
                checkpoint.read("master" if checkpoint.layout.find(name)[0].trainable else "param", name)
            inspect(whole_step)
            diff(whole_step, whole_step.parents[1] / "other")
    finally:
        manifest.write_bytes(whole)


def test_the_command_tells_intact_from_damaged(step: Path, tmp_path: Path) -> None:
    done = command(tmp_path, "verify", "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("run/step-00000100: intact: step 100 of 3 ranks, ")
    flip(step / RANK, -1)
    done = command(tmp_path, "verify", "run/step-00000100")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"{RANK}: exp_avg_sq/") or done.stdout.startswith(f"{RANK}: param/")
    assert done.stdout.endswith("run/step-00000100: damaged: 1 finding\n")
    done = command(tmp_path, "verify", "--json", "run")
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr, report["intact"]) == (1, "", False)
    assert report["findings"][0].keys() == {"file", "problem", "stream", "parameter", "start", "stop"}


@pytest.mark.parametrize("islands", [False, True])
def test_every_step_is_read_or_said_not_to_be(step: Path, tmp_path: Path, islands: bool) -> None:
    old = step.with_name("step-00000050")
    if islands:
        step.parent.rename(tmp_path / "one")
        shutil.copytree(tmp_path / "one", step.parent / "island-1")
        old = (tmp_path / "one").rename(step.parent / "island-0") / step.name
    else:
        write_checkpoint(old, example_layout(WORLD), example_content(example_layout(WORLD), step=50))
    whole = command(tmp_path, "verify", "run").returncode
    flip(old / RANK, -1)
    done = command(tmp_path, "verify", "run")
    assert (whole, done.returncode) == (0, int(islands))  # the first island's step is the one that is read
    assert done.stdout.endswith("1 other step of the run not read: --all reads every step\n")
    done = command(tmp_path, "verify", "--all", "run")
    assert (done.returncode, done.stdout.count(": intact: "), done.stdout.count(": damaged: ")) == (1, 1, 1)
    report = json.loads(command(tmp_path, "verify", "--all", "--json", "run").stdout)
    assert (report["intact"], [one["intact"] for one in report["steps"]]) == (False, [False, True])
    done = command(tmp_path, "prune", "run", "--keep-last", "2")
    assert (
        "run: holds the runs of islands: give one of them, such as run/island-0" in done.stderr
    ) == islands


def test_a_step_that_a_save_removes_meanwhile_is_not_damaged(step: Path) -> None:
    older = step.with_name("step-00000050")
    write_checkpoint(older, example_layout(WORLD), replace(example_content(example_layout(WORLD)), step=50))
    reports = verify_all(step.parent, lambda done, total: shutil.rmtree(older, ignore_errors=True))
    assert [(report.path, report.intact) for report in reports] == [(step, True)]
