"""What is said of a launch whose agents could not say it themselves."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerokit.launch.agents import explain


@dataclass
class Ended:
    """An agent that has ended with code 1 and written nothing."""

    directory: Path
    node: int = 0
    host: str | None = None

    def poll(self) -> int:
        return 1

    def trouble(self) -> None:
        return None

    def send_signal(self, number: int) -> None:
        raise AssertionError("it has ended")


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = str(explain([Ended(tmp_path)], tmp_path))
    assert said == f"node 0: its torchrun agent ended with code 1\nlogs: {tmp_path}"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    said = str(explain([Ended(tmp_path)], tmp_path))
    assert "its disk has 4096 bytes left: make room, or set TMPDIR to another\nlogs: " in said
