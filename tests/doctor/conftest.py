"""What examinations with ranks need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.distributed import server_context
from zerokit.doctor.examine import Plan


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan for two nodes with one rank each."""
    server_context()  # its files lie elsewhere
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "ZEROKIT_CMA"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run").mkdir()
    return Plan(2, 1, tmp_path / "run", f"sqlite:///{tmp_path}/runs.db", timeout_s=800.0)
