"""scripts/install-torch, with a program in the place of pip."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CPU = "https://download.pytorch.org/whl/cpu"
OTHER = "https://example.org/wheels"
HAS_GPU = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()

PIP = """#!/bin/sh
case "$*" in
"-m pip config list") echo "$CONFIGURATION"; sleep 0.2; echo "global.timeout='180'" ;; # if somebody reads on
*) echo "$*" >>"$ASKED"; exit "$STATUS" ;;
esac
"""


def install(
    folder: Path, *words: str, configuration: str = "", status: int = 0, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What the script said, and pip's commands."""
    (folder / "python").write_text(PIP)
    (folder / "python").chmod(0o755)
    (asked := folder / "asked").touch()
    known = {name: value for name, value in os.environ.items() if name != "TORCH_INDEX_URL"}
    pip = {"ASKED": str(asked), "CONFIGURATION": configuration, "STATUS": str(status)}
    done = subprocess.run(
        [ROOT / "scripts/install-torch", folder / "python", *words],
        env=known | pip | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return done, asked.read_text().splitlines()


@pytest.mark.parametrize("status", [0, 1])
def test_without_a_gpu_torch_comes_from_the_cpu_index_where_that_can_be_reached(
    tmp_path: Path, status: int
) -> None:
    configuration = "global.cert='/certificates'"  # names no index
    done, commands = install(tmp_path, "torch==2.13.0", configuration=configuration, status=status)
    assert done.returncode == 0
    if HAS_GPU:
        assert commands == []
        return
    (command,) = commands
    assert f"--no-deps --index-url {CPU}" in command
    assert command.endswith(" torch==2.13.0")
    assert "no NVIDIA GPU here" in done.stderr
    fallback = "torch==2.13.0 cannot be had there. Torch from pip's own index may bring several GB"
    assert (fallback in done.stderr) == (status == 1)


@pytest.mark.parametrize(
    "configuration",
    [
        "global.index-url='https://mirror/simple'",
        "global.extra-index-url='file:///simple'",
        ":env:.find-links='/wheels'",
    ],
)
def test_indexes_that_pip_was_given_are_kept(tmp_path: Path, configuration: str) -> None:
    done, commands = install(tmp_path, configuration=configuration)
    assert (done.returncode, commands) == (0, [])


def test_a_machine_with_a_gpu_gets_cuda(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done, commands = install(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, commands) == (0, [])


@pytest.mark.parametrize("configuration", ["", ":env:.find-links='/wheels'"])
def test_an_index_that_was_named_is_taken(tmp_path: Path, configuration: str) -> None:
    done, (command,) = install(tmp_path, configuration=configuration, TORCH_INDEX_URL=OTHER)
    assert done.returncode == 0
    assert f"--no-deps --index-url {OTHER} torch" in command
    done, _ = install(tmp_path, status=1, TORCH_INDEX_URL=OTHER)
    assert done.returncode == 1, "torch from elsewhere is not what was asked for"
    (tmp_path / "asked").unlink()
    done, commands = install(tmp_path, TORCH_INDEX_URL="")
    assert (done.returncode, commands) == (0, [])
