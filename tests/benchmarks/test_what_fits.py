"""The tables of what fits are those of the formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.what_fits import MODELS, plan_all, table_of_costs, table_of_fits
from zerokit.bench.catalogue.workloads import describe
from zerokit.planning.cells import GIB

DOCS = Path(__file__).resolve().parents[2] / "docs" / "plan.md"


def test_the_documentation_has_what_is_planned() -> None:
    text, planned = DOCS.read_text(encoding="utf-8"), plan_all()
    for table in (table_of_fits(planned), table_of_costs(planned)):
        assert table in text
    sizes = [f"{(describe(model).parameters or 0) / 1e9:.1f}" for model in MODELS]
    words = " ".join(text.split())
    assert f"have {', '.join(sizes[:-1])} and {sizes[-1]} billion parameters" in words
    alone = planned["llama-8b", 1]["host"].memory
    assert 48 * GIB < alone.needed <= 48 * GIB + alone.peak["gradients"] / 2  # in bf16
    for cells in planned.values():
        device, host, disk, fp8 = (cells[home].memory for home in ("device", "host", "disk", "fp8"))
        assert host.needed == disk.needed < fp8.needed < device.needed
        assert host.away == disk.away > 0
    for model in MODELS:
        # Twelve bytes a parameter come and leave, at 16 GB/s each way, or at 6 and then at 4.
        nbytes, cells = 12.0 * (describe(model).parameters or 0), planned[model, 1]
        waits = {home: time.visits_s for home in ("host", "disk") if (time := cells[home].time) is not None}
        assert waits["disk"] == pytest.approx(nbytes / 6e9 + nbytes / 4e9, rel=0.02)
        # The first unit comes, and the last one leaves, beside nothing else.
        assert nbytes / 16e9 < waits["host"] < 1.3 * nbytes / 16e9
