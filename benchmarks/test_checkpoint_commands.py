"""What reads or writes a whole checkpoint without ranks: resharding, weights for other programs, verification."""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import zerokit
from benchmarks.elsewhere import InTurns, elsewhere
from benchmarks.measuring import empty, remove

TO = 8
"""Ranks that the checkpoint is resharded to."""
_BLOCK = 1 << 20


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    os.sync()


@pytest.mark.benchmark(group=f"reshard: a checkpoint to {TO} ranks, to the disk", timer=elsewhere)
@pytest.mark.parametrize("how", ["zerokit, verified", "cp -r and sync"])
def test_reshard(in_turns: InTurns, step: Path, tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    calls: dict[str, Callable[[], object]] = {
        "zerokit, verified": partial(zerokit.reshard, step, TO, out),
        "cp -r and sync": partial(_copy, step, out),
    }
    in_turns(how, calls, lambda name: empty(out))
    remove(out)
    calls[how]()
    assert zerokit.verify(out).intact


@pytest.mark.benchmark(group="consolidate: the weights of a checkpoint, to the disk", timer=elsewhere)
@pytest.mark.parametrize("how", ["zerokit, verified", "cp -r and sync"])
def test_consolidate(in_turns: InTurns, step: Path, tmp_path: Path, how: str) -> None:
    weights, out = tmp_path / "weights", tmp_path / "out"
    zerokit.consolidate(step, weights)
    calls: dict[str, Callable[[], object]] = {
        "zerokit, verified": partial(zerokit.consolidate, step, out),
        "cp -r and sync": partial(_copy, weights, out),
    }
    in_turns(how, calls, lambda name: empty(out))
    remove(out)
    calls[how]()
    assert not zerokit.diff(out, step).differences


@pytest.mark.benchmark(group="verify: every byte of a checkpoint", timer=elsewhere)
@pytest.mark.parametrize("how", ["zerokit", "read, zlib.crc32"])
def test_verify(in_turns: InTurns, step: Path, how: str) -> None:
    def by_zlib() -> list[int]:
        found = []
        for path in sorted(path for path in step.iterdir() if path.is_file()):
            crc = 0
            with path.open("rb", buffering=0) as file:
                while block := file.read(_BLOCK):
                    crc = zlib.crc32(block, crc)
            found.append(crc)
        return found

    in_turns(how, {"zerokit": lambda: zerokit.verify(step), "read, zlib.crc32": by_zlib})
    assert zerokit.verify(step).intact
