"""Pages of HTML and pictures about benches: self-contained, for light, dark, narrow and paper, safe for any record.

A record is somebody's file: every text of it is escaped, and the page allows neither scripts nor anything from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zerokit.bench.comparison.cells import baselines, make_cells, side_by_side
from zerokit.bench.comparison.charts import make_charts
from zerokit.bench.comparison.drawing import COLOURS, png, svg
from zerokit.bench.comparison.page import Picture, make_page
from zerokit.bench.comparison.runs import Run
from zerokit.bench.record import Record, write_text

# Of a picture's column on a desk and on a telephone, in pixels: text keeps its size, so each is drawn for its width.
WIDE, NARROW = 560.0, 350.0


def write_report(records: Sequence[Record], path: Path) -> None:
    """The page about one sweep (at least one record), written whole or not at all."""
    write_comparison([Run("", tuple(records))], path)


def write_comparison(runs: Sequence[Run], path: Path) -> None:
    """The page about several runs; the first is the baseline."""
    write_text(render(runs), path)


def plots(records: Record | Sequence[Record]) -> dict[str, bytes]:
    """Every picture as PNG by its name, without what needs more figures than these records have."""
    runs = [Run("", (records,) if isinstance(records, Record) else tuple(records))]
    cells = make_cells(runs)
    charts = make_charts(cells, baselines(cells, runs))
    return {chart.name: png(chart.draw(WIDE), chart.title) for chart in charts}


def render(runs: Sequence[Run]) -> str:
    """The page's HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    cells = make_cells(runs)
    partners = baselines(cells, runs)
    cells = side_by_side(cells, partners)
    pictures = [
        Picture(
            chart.name,
            chart.title,
            chart.note,
            chart.legend,
            # Text in the shapes was escaped where the elements were made.
            wide=Markup(svg(chart.draw(WIDE), chart.label)),
            narrow=Markup(svg(chart.draw(NARROW), chart.label)),
        )
        for chart in make_charts(cells, partners)
    ]
    page = make_page(cells, partners, runs, pictures)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("report.html.jinja").render(page=page, colours=COLOURS) + "\n"
