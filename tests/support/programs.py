"""Programs in PATH that stand for a cluster's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Programs:
    """Shell scripts in PATH; each is given a line of what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/bash\necho "$*" >> {path}.asked\n{body}\n')
        path.chmod(0o755)

    def asked(self, name: str) -> list[str]:
        path = self.folder / f"{name}.asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    (folder := tmp_path / "programs").mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return Programs(folder)
