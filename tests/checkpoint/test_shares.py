"""Checkpoints of ranks with unequal shares: any cut goes on with any other, and is cut as another by a reshard."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zerokit
from tests.checkpoint.test_format import VALIDATOR, read_all, read_manifest
from tests.support.checkpoints import flip, sealed
from tests.support.crashes import read_tree
from tests.support.distributed import run_ranks
from tests.support.models import CASES
from tests.support.training import Run, Trajectory, build_seeded, digest, one_step, whole_weights, wrap
from zerokit.checkpoint.load import load
from zerokit.checkpoint.manifest import read_manifest as manifest_of
from zerokit.checkpoint.save import save

NAME, CASE, SAVED, ENDED = "odd_shapes", CASES["odd_shapes"], 3, 5
CUTS: dict[int, list[tuple[int, ...]]] = {
    2: [(), (3, 1), (0, 1)],
    3: [(), (2, 1, 1), (1, 0, 3)],
    4: [(5, 3, 2, 0), ()],
}
KINDS: dict[str, tuple[Run, dict[str, Any]]] = {
    "adamw": (Run(), {}),
    "muon": (Run(optimizer="muon"), {}),
    "adafactor": (Run(optimizer="adafactor"), {}),
    "fp8": (Run(precision="bf16"), {"states": "fp8"}),
}


def _path(folder: str, kind: str, shares: Sequence[int]) -> Path:
    return Path(folder, f"{kind}-{'-'.join(map(str, shares)) or 'equal'}")


def _saved(folder: str, world: int) -> dict[str, list[str]]:
    """The bits at the end, of every kind and cut; saved on the way."""
    found: dict[str, list[str]] = {}
    for kind, (run, options) in KINDS.items():
        for shares in CUTS[world]:
            model = build_seeded(CASE, dist.get_rank())
            zero = wrap(model, CASE, run, shares=shares or None, **options)
            for step in range(SAVED):
                one_step(model, zero, CASE, run, step, Trajectory())
            save(_path(folder, kind, shares), zero, step=SAVED)
            found.setdefault(kind, []).append(_end(model, zero, run))
    return found


def _end(model: Any, zero: zerokit.ZeroOptimizer, run: Run) -> str:
    for step in range(SAVED, ENDED):
        one_step(model, zero, CASE, run, step, Trajectory())
    return digest(whole_weights(model).items())


def _loaded(folder: str, world: int) -> dict[str, list[str]]:
    """The bits at the end, from every kind and cut into every other."""
    found: dict[str, list[str]] = {}
    for turn, (kind, (run, options)) in enumerate(KINDS.items()):
        for source in CUTS[world]:
            for target in CUTS[world]:
                run = replace(run, stage=turn % 4)
                model = build_seeded(CASE, dist.get_rank())
                zero = wrap(model, CASE, run, shares=target or None, **options)
                load(_path(folder, kind, source), zero)
                found.setdefault(kind, []).append(_end(model, zero, run))
    return found


@pytest.mark.full(default="3")
@pytest.mark.parametrize("world", CUTS)
def test_any_cut_goes_on_with_any_other_and_is_resharded_as_it(world: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ends = run_ranks(world, _saved, folder, world)
    again = run_ranks(world, _loaded, folder, world)
    for rank in range(world):
        for kind in KINDS:
            assert len({*ends[rank][kind], *again[rank][kind]}) == 1, (rank, kind)
    for kind in KINDS:
        trees = {shares: read_tree(_path(folder, kind, shares)) for shares in CUTS[world]}
        values = [read_all(_path(folder, kind, shares) / f"step-{SAVED:08d}") for shares in CUTS[world]]
        assert all(value == values[0] for value in values)
        for source in CUTS[world]:
            for target in CUTS[world]:
                written = tmp_path / "out"
                zerokit.reshard(_path(folder, kind, source), world, written, shares=target, force=True)
                assert read_tree(written) == trees[target], (kind, source, target)
    step = _path(folder, "adamw", CUTS[world][0] or CUTS[world][1]) / f"step-{SAVED:08d}"
    plain = read_manifest(step)
    VALIDATOR.validate(plain)
    assert plain["version"] == [5, 0]
    assert manifest_of(step)[0].layout.shares == tuple(plain["shares"])


def test_a_command_cuts_by_shares_and_damage_is_found(tmp_path: Path) -> None:
    run_ranks(2, _saved, str(tmp_path), 2)
    source, out = _path(str(tmp_path), "adamw", ()), tmp_path / "out"
    command = [sys.executable, "-m", "zerokit", "reshard", str(source), "--to", "4", "-o", str(out)]
    subprocess.run([*command, "--shares", "3,3,1,1"], check=True, capture_output=True)
    assert zerokit.verify(out).intact
    assert zerokit.diff(source, out).same
    flip(out / f"step-{SAVED:08d}" / "rank-00000-of-00004.safetensors", -1)
    report = zerokit.verify(out)
    assert [finding.file for finding in report.findings] == ["rank-00000-of-00004.safetensors"]
    for shares, text in (
        ("3,1", "2 shares are given"),
        ("0,0,0,0", "not all of them 0"),
        ("a", "expected integers"),
    ):
        done = subprocess.run(
            [*command, "--force", "--shares", shares], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert text in done.stderr


@pytest.mark.full(default="*0,0*")
@pytest.mark.parametrize(
    "shares", ["[2,2]", "[1,1]", "[0,0]", "[-1,2]", "[1]", '["1",2]', "[1.0,2]", "[1,2097152]"]
)
def test_shares_that_no_writer_states_are_refused(shares: str, tmp_path: Path) -> None:
    run_ranks(2, _saved, str(tmp_path), 2)
    step = _path(str(tmp_path), "adamw", (3, 1)) / f"step-{SAVED:08d}"
    plain = read_manifest(step) | {"shares": json.loads(shares)}
    (step / "manifest.json").write_bytes(sealed(plain))
    with pytest.raises(zerokit.CheckpointError, match="shares"):
        zerokit.Checkpoint(step)
