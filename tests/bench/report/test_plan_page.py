"""The page of a plan: every cell with its figures, pictures that say what they show, and nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from zerokit.bench.plans.ask import plan
from zerokit.bench.report.plan_page import pictures, write_plan


class Cells(HTMLParser):
    """The rows of the page's table, and its parts by id."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.ids: list[str] = []
        self._open = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attributes if name == "id" and value]
        if tag == "tr":
            self.rows.append([])
        self._open = tag in ("td", "th")
        if self._open:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag not in ("td", "th")


@pytest.mark.parametrize("device", ["h100-80", "l40s"])
def test_a_page_shows_the_plan_and_no_column_without_figures(device: str, tmp_path: Path) -> None:
    found = plan("gpt-tiny", gpus=8, device=device, seq_len=64, batch_size=2, recompute=False)
    path = tmp_path / "plan.html"
    write_plan(found, path)
    text = path.read_text()
    page = Cells()
    page.feed(text)
    head, *rows = page.rows
    assert {len(row) for row in rows} == {len(head)}
    assert ("MFU" in head) == (device == "h100-80")  # nothing was measured on the other one
    assert [row[0] for row in rows] == [one.cell.stage_label for one in found.fitting]
    drawn = ["memory", "step", "scaling"] if device == "h100-80" else ["memory"]
    assert [picture.name for picture in pictures(found)] == drawn
    assert set(drawn) <= set(page.ids)
    assert found.why in text.replace("&#39;", "'")
    assert not re.search(r'(?:src|href)="(?!#)', text.partition("<script")[0])
