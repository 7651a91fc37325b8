"""Pictures as shapes: lengths are proportional, labels stay inside and do not cover each other."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.records import make_cell, make_failure, make_sweep
from zerokit.bench.comparison.cells import baselines, make_cells
from zerokit.bench.comparison.charts import Chart, make_charts, pareto
from zerokit.bench.comparison.drawing import COLOURS, Dot, Drawing, Line, Rect, Text, svg, text_width
from zerokit.bench.comparison.plots import (
    Part,
    Point,
    Row,
    Series,
    Strip,
    bars,
    lines,
    nice_ticks,
    scatter,
    strips,
)
from zerokit.bench.comparison.runs import Run
from zerokit.bench.record import Record

WIDTHS = (560.0, 350.0)


def charts_of(*records: Record) -> dict[str, Chart]:
    runs = [Run("", records)]
    cells = make_cells(runs)
    return {chart.name: chart for chart in make_charts(cells, baselines(cells, runs))}


def inside(drawing: Drawing) -> None:
    """Every shape lies on the ground, text as far as its width is known."""
    for shape in drawing.shapes:
        if isinstance(shape, Rect):
            assert shape.x >= -1
            assert shape.x + shape.width <= drawing.width + 1
        elif isinstance(shape, Dot):
            assert 0 <= shape.x <= drawing.width
            assert 0 <= shape.y <= drawing.height
        elif isinstance(shape, Line):
            assert all(0 <= x <= drawing.width + 1 and -1 <= y <= drawing.height + 1 for x, y in shape.points)
        else:
            width = text_width(shape.text, shape.size)
            left = shape.x - {"start": 0.0, "middle": width / 2, "end": width}[shape.anchor]
            assert left >= -20, shape
            assert left + width <= drawing.width + 20, shape


def test_a_sweep_has_every_picture_and_all_fit() -> None:
    charts = charts_of(*make_sweep())
    assert list(charts) == [
        "throughput-tokens",
        "memory",
        "throughput-memory-tokens",
        "steps",
        "communication",
        "phases",
        "state",
        "loss",
    ]
    for chart in charts.values():
        for width in WIDTHS:
            inside(chart.draw(width))
        assert chart.label.startswith(chart.title.split(",")[0]) or ": " in chart.label


def test_one_cell_is_not_compared_with_itself() -> None:
    assert list(charts_of(make_cell())) == ["steps", "communication", "phases", "state", "loss"]


def test_cells_that_came_to_nothing_have_no_pictures() -> None:
    assert charts_of(make_failure("failed", "why"), make_failure("killed", "signal 9", stage=3)) == {}


def test_a_number_that_varies_becomes_an_axis() -> None:
    records = [
        make_cell("zerokit", stage, step_ms=400.0 * batch, batch_size=batch)
        for stage in (0, 3)
        for batch in (1, 2, 4)
    ]
    chart = charts_of(*records)["throughput-tokens-by-batch_size"]
    texts = [shape.text for shape in chart.draw(560.0).shapes if isinstance(shape, Text)]
    assert {"zerokit 0", "zerokit 3", "1", "2", "4"} <= set(texts)


def test_bars_are_proportional_to_their_values() -> None:
    rows = [
        Row("one", [Part(100.0, "ddp")], "100"),
        Row("two", [Part(30.0, "ddp"), Part(20.0, "soft")], "50"),
    ]
    lengths = [shape.width for shape in bars(rows, 500.0).shapes if isinstance(shape, Rect)]
    assert lengths[1] / lengths[0] == pytest.approx(0.3)
    assert lengths[2] / lengths[0] == pytest.approx(0.2)


def test_long_labels_move_above_their_bars() -> None:
    rows = [Row("a very long name of a cell · batch 16", [Part(1.0, "ddp")], "1")]
    (bar,) = (shape for shape in bars(rows, 350.0).shapes if isinstance(shape, Rect))
    label = next(shape for shape in bars(rows, 350.0).shapes if isinstance(shape, Text))
    assert bar.x == 0.0
    assert label.y < bar.y


def test_steps_far_beyond_the_rest_are_counted_at_the_edge() -> None:
    values = [100.0 + step for step in range(20)] + [5000.0]
    drawing = strips([Strip("cell", values, 110.0, 102.0, 119.0, "ddp", "110")], 560.0, "ms")
    inside(drawing)
    assert any(isinstance(shape, Text) and shape.text == "110 (+1 ▸)" for shape in drawing.shapes)


def test_the_front_is_what_nothing_beats() -> None:
    assert pareto([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (2.0, 3.0)]) == [True, True, False, True]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=12))
def test_labels_of_points_do_not_cover_each_other(points: list[tuple[float, float]]) -> None:
    drawing = scatter(
        [Point(x, y, f"cell {n}", "ddp", True) for n, (x, y) in enumerate(points)], 560.0, "x", "y"
    )
    inside(drawing)
    boxes = [
        (shape.x, shape.y - 11, shape.x + text_width(shape.text), shape.y + 2)
        for shape in drawing.shapes
        if isinstance(shape, Text) and shape.text.startswith("cell")
    ]
    for place, one in enumerate(boxes):
        for other in boxes[place + 1 :]:
            assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


@settings(max_examples=40)
@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 8))
def test_ticks_are_few_round_and_inside(low: float, spread: float, count: int) -> None:
    ticks = nice_ticks(low, low + spread, count)
    assert 1 <= len(ticks) <= 2 * count + 2
    assert all(low - spread * 1e-6 <= tick <= low + spread * (1 + 1e-6) for tick in ticks)


@settings(max_examples=40)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=10))
def test_names_at_the_ends_of_lines_stay_apart(ends: list[float]) -> None:
    series = [Series(f"line {n}", [(0.0, 1.0), (5.0, end)], "ddp") for n, end in enumerate(ends)]
    places = sorted(
        shape.y
        for shape in lines(series, 560.0, "x", "y").shapes
        if isinstance(shape, Text) and "line" in shape.text
    )
    assert all(after - before > 11 for before, after in itertools.pairwise(places))


def test_an_svg_is_well_formed_and_its_text_escaped() -> None:
    drawing = Drawing(100.0, 50.0)
    drawing.add(
        Rect(1.0, 2.0, 3.456, 4.0, "ddp", 0.5, title='<script>alert("1")</script>'),
        Line(((0.0, 0.0), (1.0, math.pi)), "grid", dashed=True),
        Dot(5.0, 5.0, 2.0, "ddp", ring=True),
        Text(1.0, 1.0, "a < b & c", "end", bold=True),
    )
    text = svg(drawing, 'label "quoted" <b>')
    root = ElementTree.fromstring(text)
    assert root.attrib["aria-label"] == 'label "quoted" <b>'
    assert len(list(root)) == 4
    assert "<script" not in text


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_can_be_told_from_their_ground(dark: bool) -> None:
    ground = COLOURS["ground"][dark]
    for role, colours in COLOURS.items():
        if role in ("ground", "panel", "grid", "soft"):
            continue
        least = 4.5 if role in ("text", "muted", "better", "worse") else 3.0
        assert contrast(colours[dark], ground) >= least, role
        if role in ("text", "muted"):
            assert contrast(colours[dark], COLOURS["panel"][dark]) >= 4.5, role
