"""Pages: complete, self-contained, and harmless whatever a record says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.bench.records import MIB, make_cell, make_failure, make_record, make_sweep
from zerokit.bench.comparison.cells import make_cells
from zerokit.bench.plans.ask import plan
from zerokit.bench.record.measured import Trace
from zerokit.bench.record.record import Run
from zerokit.bench.report import render as drawing
from zerokit.bench.report.pictures import make_pictures
from zerokit.bench.report.plan_page import pictures, write_plan
from zerokit.bench.report.render import WIDE, bundle, render, svg, write_comparison

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Elements(HTMLParser):
    """Collects tags, and complains of any that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(page: str) -> Elements:
    elements = Elements()
    elements.feed(page)
    elements.close()
    assert elements.open == []
    return elements


@pytest.fixture(scope="module")
def page() -> str:
    return render([Run("", tuple(make_sweep()))])


def test_the_page_says_who_won_and_what_failed(page: str) -> None:
    text = " ".join("".join(parsed(page).text).split())
    assert "gpt-34m on 2 ranks: zerokit, DDP, ZeroRedundancy, FSDP2, parameter server" in text
    assert re.search(r"Least memory ?no clear winner ?810 to [\d,]+ MiB a rank", text)
    assert "out of memory: needs about 41.2 GiB a rank, 7.5 GiB are available" in text
    assert "not run: DeepSpeed 2 (deepspeed is not installed here; pip install deepspeed)" in text


def test_the_optimizer_is_named_with_its_share_of_the_step(page: str) -> None:
    assert "<dt>optimizer</dt><dd>adamw</dd>" in page
    assert "phase/optimizer_share" in page
    shown = render([Run("", (make_cell(optimizer="muon"), make_cell("fsdp2", 3, optimizer="muon")))])
    assert " · fp32 · muon · 2 ranks on 2 nodes" in shown
    results = shown[shown.index(">Results<") : shown.index(">Pictures<")]
    assert "optimizer&#39;s share" in results
    assert results.count('<td class="value">10.2</td>') == 2


def test_states_elsewhere_stand_beside_the_state(page: str) -> None:
    state = {"parameters": 6 * MIB, "disk": 5 * MIB, "total": 6 * MIB}
    away = make_cell(states="/nvme")
    away = replace(away, ranks=[replace(rank, memory_bytes=state) for rank in away.ranks])
    shown = render([Run("", (make_cell(), away))])
    text = " ".join("".join(parsed(shown).text).split())
    for words in (
        "states /nvme",
        "states elsewhere",
        "their visits as well",
        "they visit the device in",
    ):
        assert words in text
    assert "+ 5 away" in shown
    assert "elsewhere" not in page


def test_nothing_is_loaded_from_outside_and_only_the_drawing_runs(page: str) -> None:
    elements = parsed(page)
    assert not {"link", "iframe", "object", "img"} & {tag for tag, _ in elements.seen}
    for _, attributes in elements.seen:
        assert not {"src", "href", "xlink:href", "onload", "onclick"} & set(attributes)
    own = page.replace(bundle(), "")
    assert set(re.findall(r"https?:[^\"' ]+", own)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
        "https://vega.github.io/schema/vega-lite/v6.4.1.json",  # a name: nothing is asked for there
    }
    assert set(re.findall(r"url\((.)", own)) <= {"#"}
    assert [attributes for tag, attributes in elements.seen if tag == "script"] == [
        {"type": "application/json", "id": "specifications"},
        {},
    ]
    digest = base64.b64encode(hashlib.sha256(bundle().encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert policy in [attributes.get("content") for tag, attributes in elements.seen if tag == "meta"]


def test_every_picture_has_words_and_stands_still_without_scripts(page: str) -> None:
    elements = parsed(page)
    places = [attributes for _, attributes in elements.seen if attributes.get("class") == "plot"]
    assert len(places) == 6
    for attributes in places:
        assert attributes["role"] == "img"
        assert len(attributes["aria-label"] or "") > 20
    widths = [int(str(attributes["width"])) for tag, attributes in elements.seen if tag == "svg"]
    assert [round(width, -1) for width in widths] == 6 * [560, 350]
    assert 'fill="var(--zerokit)"' in page  # a colour that the page's style knows for light and for dark
    ids = re.findall(r'\bid="([^"]+)"', page.replace(bundle(), ""))
    assert len(ids) == len(set(ids))
    headings = [attributes for tag, attributes in elements.seen if tag == "th"]
    assert {attributes.get("scope") for attributes in headings} == {"col", "row"}
    data = "".join(elements.text)
    specifications = data[data.index('{"config"') :].partition("\n")[0]
    assert len(json.loads(specifications)["pictures"]) == 6


EVIL = "</title><script>alert(1)</script><b onclick='x'>{{ 7*7 }} $\\frac{1}{0$ \N{RIGHT-TO-LEFT OVERRIDE}"


def test_hostile_text_is_text() -> None:
    cell = make_cell()
    assert cell.model is not None
    assert cell.environment is not None
    hostile = replace(
        cell,
        id=EVIL,
        sweep=EVIL,
        created=EVIL,
        settings=replace(cell.settings, data=EVIL),
        model=replace(cell.model, name=EVIL, unit="tokens", flops_convention=EVIL),
        environment=replace(cell.environment, processor=EVIL, packages={EVIL: EVIL}, git_commit=EVIL),
        ranks=[replace(rank, host=EVIL, device=EVIL) for rank in cell.ranks],
    )
    page = render([Run(EVIL, (hostile, make_failure("failed", EVIL))), Run("other", (make_cell("ddp", 0),))])
    elements = parsed(page)
    assert [tag for tag, _ in elements.seen].count("script") == 2
    assert not any("onclick" in attributes for _, attributes in elements.seen)
    assert "49" not in re.findall(r"onclick=.{0,40}", page)


def test_a_page_of_one_plain_record_and_of_failures_only(tmp_path: Path) -> None:
    write_comparison([Run("", (make_record(),))], tmp_path / "one.html")
    parsed((tmp_path / "one.html").read_text(encoding="utf-8"))
    failures = make_failure("failed", "why"), make_failure("killed", "signal 9", stage=1)
    write_comparison([Run("", failures)], tmp_path / "none.html")
    text = (tmp_path / "none.html").read_text(encoding="utf-8")
    assert "script" not in {tag for tag, _ in parsed(text).seen}
    assert "signal 9" in text
    assert "Pictures" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["none.html", "one.html"]


def test_what_differs_is_told_of_cells_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upright where cells outnumber settings; a cell that never ran has no environment that could differ."""
    monkeypatch.setattr(drawing, "svg", lambda picture, width: "")
    cells = [make_cell("zerokit", stage) for stage in (0, 1, 2)]
    assert cells[2].environment is not None
    cells[2] = replace(cells[2], environment=replace(cells[2].environment, threads=2))
    refused = make_failure("unsupported", "ddp has no stage 3: it has stage 0 only", "ddp", 3)
    page = render([Run("", (*cells, refused))])
    shown = page[page.index('id="differences"') : page.index('id="conditions"')]
    shown = re.sub("</?span[^>]*>", "", shown)
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>.*?</tr>", shown)]
    assert rows == [["", "threads a rank"], ["zerokit 0", "1"], ["zerokit 1", "1"], ["zerokit 2", "2"]]


def test_long_names_keep_both_ends() -> None:
    cells = [make_cell(stage=stage) for stage in (0, 3)]
    name = f"of_mine.{'deeply.' * 12}models:one"  # beside another model, so that labels name it
    cells[1] = replace(cells[1], settings=replace(cells[1].settings, model=name))
    for picture in make_pictures(make_cells([Run("", tuple(cells))])):
        drawn = svg(picture, WIDE)
        assert re.search("zerokit 3 · of_m[^<]*…[^<]*eply.models:one<", drawn)
        assert name not in drawn


def test_a_legend_of_two_rows_has_its_room() -> None:
    """Vega knows of the second row only after it has made room for the first: the title was cut."""
    found = {one.name: svg(one, WIDE) for one in make_pictures(make_cells([Run("", tuple(make_sweep()))]))}
    heights = {name: float(found[name].split('height="')[1].split('"')[0]) for name in ("state", "memory")}
    rows = 44 * 4  # fewer bars than cells: only zerokit counts its state
    assert heights["state"] + rows - heights["memory"] == 36.0


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
    drawn = ["memory", "step"] if device == "h100-80" else ["memory"]
    assert [picture.name for picture in pictures(found)] == drawn
    assert set(drawn) <= set(re.findall(r'\bid="([^"]+)"', text))
    assert found.why in text.replace("&#39;", "'")
    assert not re.search(r'(?:src|href)="(?!#)', text.partition("<script")[0])


def test_timelines_are_linked_from_where_the_page_is(tmp_path: Path) -> None:
    files = (str(tmp_path / "t" / "a b.json.gz"), "/elsewhere/javascript:alert(1).json", 'a"><b>\0')
    records = [
        replace(record, trace=Trace(file, 1.0, 1, 0.0))
        for record, file in zip(make_sweep(), files, strict=False)
    ]
    write_comparison([Run("", tuple(records))], tmp_path / "page.html")
    links = [attrs for tag, attrs in parsed((tmp_path / "page.html").read_text()).seen if tag == "a"]
    addresses = [attrs["href"] for attrs in links if "download" in attrs]
    assert addresses == [
        "t/a%20b.json.gz",
        "file:///elsewhere/javascript%3Aalert%281%29.json",
        "file://a%22%3E%3Cb%3E%00",
    ]
    assert "https://ui.perfetto.dev" in [attrs["href"] for attrs in links]
