"""scripts/gpu-check on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    return subprocess.run(
        [ROOT / "scripts" / "gpu-check", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_a_gpu_it_says_so_and_does_not_pass() -> None:
    done = run()
    assert done.returncode == 4, done.stderr
    assert "finds no CUDA device here; nothing was checked" in done.stderr


def test_an_unknown_check_is_a_usage_error() -> None:
    done = run("speed")
    assert done.returncode == 2
    assert "no check is called speed" in done.stderr
