"""`verify`: an intact checkpoint has no finding; every damage has one, with its place; nothing else has."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.inside import zerokit_inside as zerokit
from tests.support.checkpoints import (
    example_content,
    example_extra,
    example_layout,
    flip,
    sealed,
    write_checkpoint,
)
from tests.support.mutations import mutated
from zerokit.checkpoint.diff import diff
from zerokit.checkpoint.inspect import inspect
from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.verify import Finding, verify, verify_all
from zerokit.errors import CheckpointError

WORLD = 3
RANK_1 = "rank-00001-of-00003.safetensors"


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
    content = bytearray((step / RANK_1).read_bytes())
    checkpoint = Checkpoint(step)
    extents = checkpoint.rank_file(1).extents
    for extent in (extents[0], extents[-2]):
        content[extent.offset] ^= 255
    content[100] ^= 1  # the header
    (step / RANK_1).write_bytes(content[: extents[-1].offset + 1])
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
        (RANK_1, "truncated"),
        (RANK_1, "its header is damaged or foreign"),
        (RANK_1, "damaged"),
        (RANK_1, "damaged"),
        (RANK_1, "beyond the end of the file"),
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


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Path]:
    """A step whose manifest may be changed, that manifest, and an untouched copy."""
    layout, folder = example_layout(WORLD), tmp_path_factory.mktemp("hostile")
    content = example_content(layout)
    manifest = write_checkpoint(folder / "step", layout, content)
    write_checkpoint(folder / "copy", layout, content)
    return folder / "step", json.loads(manifest.to_bytes()), folder / "copy"


@settings(max_examples=60)
@given(st.data())
def test_a_changed_manifest_with_a_right_checksum_is_survived(
    hostile: tuple[Path, dict[str, Any], Path], data: st.DataObject
) -> None:
    """By everything that reads checkpoints; it may pass only if nothing that counts was changed."""
    step, plain, copy = hostile
    (step / "manifest.json").write_bytes(sealed(mutated(plain, data)))
    report = verify(step)
    assert report.intact or all(finding.file for finding in report.findings)
    try:
        checkpoint = Checkpoint(step)
        for name in checkpoint.names:
            checkpoint.read("master" if checkpoint.layout.find(name)[0].trainable else "param", name)
        inspect(step)
        diff(step, copy)
    except CheckpointError:
        assert not report.intact


def test_the_command_tells_intact_from_damaged(step: Path, tmp_path: Path) -> None:
    done = zerokit(tmp_path, "verify", "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("run/step-00000100: intact: step 100 of 3 ranks, ")
    flip(step / RANK_1, -1)
    done = zerokit(tmp_path, "verify", "run/step-00000100")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"{RANK_1}: exp_avg_sq/") or done.stdout.startswith(f"{RANK_1}: param/")
    assert done.stdout.endswith("run/step-00000100: damaged: 1 finding\n")
    done = zerokit(tmp_path, "verify", "--json", "run")
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
    whole = zerokit(tmp_path, "verify", "run").returncode
    flip(old / RANK_1, -1)
    done = zerokit(tmp_path, "verify", "run")
    assert (whole, done.returncode) == (0, int(islands))  # the first island's step is the one that is read
    assert done.stdout.endswith("1 other step of the run not read: --all reads every step\n")
    done = zerokit(tmp_path, "verify", "--all", "run")
    assert (done.returncode, done.stdout.count(": intact: "), done.stdout.count(": damaged: ")) == (1, 1, 1)
    report = json.loads(zerokit(tmp_path, "verify", "--all", "--json", "run").stdout)
    assert (report["intact"], [one["intact"] for one in report["steps"]]) == (False, [False, True])
    done = zerokit(tmp_path, "prune", "run", "--keep-last", "2")
    assert (
        "run: holds the runs of islands: give one of them, such as run/island-0" in done.stderr
    ) == islands


def test_a_step_that_a_save_removes_meanwhile_is_not_damaged(step: Path) -> None:
    older = step.with_name("step-00000050")
    write_checkpoint(older, example_layout(WORLD), replace(example_content(example_layout(WORLD)), step=50))
    reports = verify_all(step.parent, lambda done, total: shutil.rmtree(older, ignore_errors=True))
    assert [(report.path, report.intact) for report in reports] == [(step, True)]
