"""Packages that a bare GPU machine lacks: how they are fetched elsewhere, and their use for the time of a check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.measuring import ROOT

CARRIED = ("annotated-types", "pydantic", "pydantic_core", "typing-inspection", "zlib-ng")
"""Distributions, about 4 MB, that benches and checkpoints import."""
_FOR = "--only-binary=:all: --implementation cp --python-version 3.12 --platform manylinux_2_17_x86_64"


class WheelsError(Exception):
    """The folder of wheels cannot be installed."""


def download_command() -> str:
    """The command that fetches them for CPython 3.12 on x86-64 Linux, in the versions of constraints.txt."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    words = " ".join(f"{name}=={pins[name]}" for name in CARRIED)
    return f"pip download --no-deps --dest wheels {_FOR} {words}"


def install(wheels: Path, site: Path) -> None:
    """Installs the wheels into a folder that this process and all that it starts import from.

    Raises `WheelsError` where there are none, or pip refuses them.
    """
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise WheelsError(f"{wheels} has no wheels: {download_command()}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    done = subprocess.run([*pip, "--target", str(site), *files], capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelsError(f"pip cannot install {wheels}: {done.stderr.strip()}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, str(site))
