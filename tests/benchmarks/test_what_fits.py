"""The tables of what fits are those of the formulas."""

from __future__ import annotations

from pathlib import Path

from benchmarks.what_fits import MODELS, plan_all, table_of_costs, table_of_fits
from zerokit.bench.catalogue.workloads import describe

DOCS = Path(__file__).resolve().parents[2] / "docs" / "plan.md"


def test_the_documentation_has_what_is_planned() -> None:
    text, planned = DOCS.read_text(encoding="utf-8"), plan_all()
    for table in (table_of_fits(planned), table_of_costs(planned)):
        assert table in text
    sizes = [f"{(describe(model).parameters or 0) / 1e9:.1f}" for model in MODELS]
    words = " ".join(text.split())
    assert f"have {', '.join(sizes[:-1])} and {sizes[-1]} billion parameters" in words
    for cells in planned.values():
        device, host, disk, fp8 = (cells[home].memory for home in ("device", "host", "disk", "fp8"))
        assert host.needed == disk.needed < fp8.needed < device.needed
        # 12 bytes a parameter come and leave, at 16 GB/s each way and at 6 and 4 GB/s.
        assert host.away == disk.away
