"""The fixtures, unpacked once a session."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

ARCHIVES = Path(__file__).with_name("fixtures")
DEEPSPEED = sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("deepspeed-*"))
FSDP2 = ["fsdp2-plain", "fsdp2-titan", "fsdp2-accelerate"]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every fixture under its name; not to be written to."""
    folder = tmp_path_factory.mktemp("frameworks")
    for archive in ARCHIVES.glob("*.tar.xz"):
        with tarfile.open(archive) as content:
            content.extractall(folder, filter="data")
    return folder
