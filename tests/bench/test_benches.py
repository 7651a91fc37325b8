"""What comes of a sweep beside its records."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.records import make_sweep
from zerokit.bench.benches import write_report


def test_a_machine_without_altair_gets_a_warning_in_the_place_of_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("zerokit.bench.report.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "altair", None)
    warnings: list[str] = []
    assert not write_report(make_sweep(), tmp_path / "report.html", warnings.append)
    assert len(warnings) == 1
    assert "the report was not written" in warnings[0]
    assert "altair" in warnings[0]
