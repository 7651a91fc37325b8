"""scripts/gpu-check on a machine without a GPU, and with programs in the place of those that need one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu-check"

PYTHON = """#!/bin/sh
case "$*" in
*device_count*) echo 1 ;;
*get_device_name*) echo a GPU ;;
*test_device_way*) echo 3 passed ;;
*test_optimizers*) echo 2 skipped ;;
*test_cuda.py) echo 1 failed, 5 passed; exit 1 ;;
*"bench --no-twin"*) echo bench ;;
*compare*) exit 3 ;;
esac
"""


def run(*parts: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *parts], env=os.environ | variables, capture_output=True, text=True, timeout=800, check=False
    )


def test_without_a_gpu_it_says_so_and_does_not_pass() -> None:
    done = run(CUDA_VISIBLE_DEVICES="", PYTHON=sys.executable)
    assert done.returncode == 4, done.stderr
    assert "finds no CUDA device here; nothing was checked" in done.stderr


def test_a_failed_part_is_no_end_and_skipped_tests_are_no_success(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    parts = ("test_device_way", "test_cuda", "test_optimizers", "steps")
    done = run(*parts, PYTHON=str(tmp_path / "python"), OUTPUT=str(tmp_path / "out"))
    assert done.returncode == 1
    *rows, logs = done.stdout.splitlines()[-5:]
    assert [(row.split()[0], row.split()[3]) for row in rows] == list(
        zip(parts, ("ok", "FAILED", "FAILED", "FAILED"), strict=True)
    )
    assert logs == f"logs: {tmp_path / 'out'}"
    assert (tmp_path / "out" / "test_cuda.log").read_text() == "1 failed, 5 passed\n"


def test_every_file_with_tests_for_gpus_is_a_part() -> None:
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text() and path != Path(__file__)
    }
    assert files == {word for word in SCRIPT.read_text().split() if word.startswith("tests/")}
