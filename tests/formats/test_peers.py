"""The real frameworks go on from what we wrote. `scripts/peers test` runs these; they need its environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import zerokit
from tests.formats.conftest import expected_bytes, held_bytes
from tests.formats.make_fixtures import STEPS
from zerokit.checkpoint.formats import open_source

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.peers


def _run(path: Path, world: int, *arguments: str) -> str:
    done = subprocess.run(
        [
            *(str(ROOT / ".peers/bin/torchrun"), "--standalone", "--nproc-per-node", str(world)),
            *(str(ROOT / "tests/formats/make_fixtures.py"), str(path), *arguments),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _resumed(path: Path, world: int, *arguments: str) -> list[float]:
    output = _run(path, world, *arguments)
    (line,) = (line for line in output.splitlines() if line.startswith("RESUMED "))
    losses: list[float] = json.loads(line.removeprefix("RESUMED "))
    return losses


@pytest.mark.parametrize(
    ("name", "source_world", "world", "stage"),
    [("deepspeed-2-fp32", 4, 2, 2), ("deepspeed-2-fp32", 4, 2, 1), ("deepspeed-3-fp32", 4, 2, 3)],
)
def test_deepspeed_resumes_at_another_world(
    made: Path, tmp_path: Path, name: str, source_world: int, world: int, stage: int
) -> None:
    out = zerokit.reshard(made / name, world, tmp_path / "out")
    theirs = json.loads((made / name / "losses.json").read_text())[STEPS:]
    resumed = _resumed(out, world, "resume-deepspeed", str(stage), "fp32", str(source_world))
    assert resumed == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_fsdp2_resumes_at_another_world_by_way_of_zerokit(made: Path, tmp_path: Path, world: int) -> None:
    ours = zerokit.convert(made / "fsdp2-plain", tmp_path / "ours", format="zerokit", world=2)
    zerokit.convert(ours.path, tmp_path / "out", format="dcp", world=4)
    theirs = json.loads((made / "fsdp2-plain" / "losses.json").read_text())[STEPS:]
    assert _resumed(tmp_path / "out", world, "resume-fsdp2", "3") == pytest.approx(theirs, rel=1e-5)


def test_accelerates_own_save_state_of_fsdp2_is_read_in_bits(tmp_path: Path) -> None:
    _run(tmp_path / "saved", 2, "accelerate")
    source = open_source(tmp_path / "saved")
    assert (source.format, source.world, source.step) == ("dcp", 2, STEPS)
    assert held_bytes(source) == expected_bytes(tmp_path / "saved")
    assert "not carried over: random_states_0.pkl, random_states_1.pkl" in source.notes[0]
