"""What launches of `workload` need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.ranks import ROOT
from zerokit.launch import agents


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a launch's logs; its ranks find their program, and are not waited for long."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # as if it were not set
    monkeypatch.setattr(agents, "PEERS_FOLLOW_SECONDS", 0.5)
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"
