"""The page of a plan: every cell with its figures, pictures that say what they show, and nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zerokit.bench.plans.ask import plan
from zerokit.bench.report.plan_page import pictures, write_plan


@pytest.mark.parametrize("device", ["h100-80", "l40s"])
def test_a_page_shows_the_plan_and_no_column_without_figures(device: str, tmp_path: Path) -> None:
    found = plan("gpt-tiny", gpus=8, device=device, seq_len=64, batch_size=2, recompute=False)
    path = tmp_path / "plan.html"
    write_plan(found, path)
    text = path.read_text()
    table = re.findall(r"<tr>.*?</tr>", text.partition("<script")[0], re.DOTALL)
    head, *rows = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in table)
    assert {len(row) for row in rows} == {len(head)}
    assert ("MFU" in head) == (device == "h100-80")  # nothing was measured on the other one
    assert [row[0] for row in rows] == [one.cell.stage_label for one in found.fitting]
    drawn = ["memory", "step", "scaling"] if device == "h100-80" else ["memory"]
    assert [picture.name for picture in pictures(found)] == drawn
    assert set(drawn) <= set(re.findall(r'\bid="([^"]+)"', text))
    assert found.why in text.replace("&#39;", "'")
    assert not re.search(r'(?:src|href)="(?!#)', text.partition("<script")[0])
