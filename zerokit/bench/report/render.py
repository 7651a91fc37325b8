"""HTML pages: self-contained, for light, dark, narrow and print, safe for any record.

A record is somebody's file: its texts are escaped or data, and of scripts a page allows only the one that draws, by its
digest, with nothing from outside. Without that script the same pictures stand still.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import altair as alt
import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.comparison.cells import (
    Cell,
    common_words,
    conditions,
    make_cells,
    unsupported,
    warnings_of,
)
from zerokit.bench.comparison.tables import (
    EXTRA_STEPS,
    INSTRUMENTED,
    OF_A_PAGE,
    best_headlines,
    columns_of,
    having,
    in_order,
    listed,
    usual_metrics,
)
from zerokit.bench.record.metrics import METRICS
from zerokit.bench.record.record import FORMAT, Run, write_text
from zerokit.bench.report.pictures import COLOURS, CONFIG, NARROW, Picture, make_pictures
from zerokit.bench.run.traces import VIEWER
from zerokit.errors import ZerokitError


def page_content(cells: Sequence[Cell], runs: Sequence[Run]) -> dict[str, Any]:
    """The template's variables for these cells."""
    ran = [cell for cell in cells if cell.status != "unsupported"] or list(cells)
    well = [cell for cell in cells if cell.status == "ok"]
    differing, equal = conditions(ran)
    return {
        "title": _title(cells),
        "subtitle": _subtitle(cells),
        "warnings": warnings_of(cells),
        "headlines": [] if len(runs) > 1 else best_headlines(cells),
        "single": len(cells) > 1 and any(len(cell.measured_records) == 1 for cell in cells),
        "ran": ran,
        "results": columns_of(ran, usual_metrics(cells, OF_A_PAGE)),
        "unsupported": unsupported(cells),
        "against": _different(cell.baseline.label for cell in cells if cell.baseline is not None),
        "differing_heads": [cell.label for cell in ran],
        "differing": differing,
        "facts": equal,
        "well": well,
        "figures": columns_of(well, in_order(METRICS), compared=False),
        "extra": (EXTRA_STEPS, INSTRUMENTED),
        "has": {name for name in METRICS if having(cells, name)},
        "cells": cells,
        "records": [record for cell in cells for record in cell.records],
        "format": FORMAT,
    }


def _different(values: Iterable[Any]) -> list[str]:
    """Different values in order, without None, as text."""
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def _title(cells: Sequence[Cell]) -> str:
    well = [cell for cell in cells if cell.status == "ok"] or cells
    engines = _different(cell.settings["engine"] for cell in well)
    titles = [ENGINES[engine].title if engine in ENGINES else engine for engine in engines]
    worlds = [str(world) for world in sorted({cell.first.settings.world for cell in cells})]
    models = listed(_different(cell.settings["model"] for cell in cells))
    return f"{models} on {listed(worlds)} rank{'' if worlds == ['1'] else 's'}: {', '.join(titles)}"


def _subtitle(cells: Sequence[Cell]) -> str:
    machines = [cell.first.environment for cell in cells if cell.first.environment is not None]
    places = (
        f"{one.accelerators} × {one.accelerator}"
        if one.accelerator
        else f"{one.processor}, {one.cores} cores"
        for one in machines
    )
    common = (_different(places), _different(f"torch {one.torch}" for one in machines))
    days = [record.created[:10] for cell in cells for record in cell.records]
    words = [*common_words(cells), *(known[0] for known in common if len(known) == 1)]
    return " · ".join([*words, " to ".join(_different([min(days), max(days)]))])


WIDE = 560  # pixels, of a picture's column on a desk: text keeps its size, so a still picture is drawn for its width
_VERSION = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
_FOLDER = Path(__file__).parent


def write_comparison(runs: Sequence[Run], path: Path, baseline: str | None = None) -> None:
    """The page of several runs, compared as `make_cells` does. Raises as `write_page`."""
    write_page(render(runs, baseline, path.parent), path)


def write_page(text: str, path: Path) -> None:
    """Write a page as one file. Raises `ZerokitError` where the disk refuses it."""
    try:
        write_text(text, path)
    except OSError as error:
        raise ZerokitError(f"the page cannot be written to {path}: {error.strerror}") from error


def render(runs: Sequence[Run], baseline: str | None = None, folder: Path | None = None) -> str:
    """The page's HTML; what lies below its `folder` is linked to from there."""
    cells = make_cells(runs, baseline)
    page = page_content(cells, runs) | {"traces": list(_traces(cells, folder)), "viewer": VIEWER}
    return document("page.html.jinja", make_pictures(cells), page=page)


def _traces(cells: Sequence[Cell], folder: Path | None) -> Iterator[tuple[str, str, str]]:
    """The label of each cell that has a timeline, the address of the file, and its name."""
    for cell in cells:
        for record in cell.records:
            if record.trace is not None:
                path = Path(record.trace.file)
                below = folder is not None and path.is_relative_to(folder.absolute())
                # Quoted, so that no record makes it a script.
                address = quote(str(path.relative_to(folder.absolute()) if folder and below else path))
                yield cell.label, address if below else f"file://{address}", path.name


def document(template: str, pictures: Sequence[Picture], **content: Any) -> str:
    """Render a template of this folder, with each picture as a static SVG and as an interactive chart."""
    script = bundle() if pictures else ""
    environment = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined)
    text = environment.get_template(template).render(
        **content,
        pictures=pictures,
        colours=COLOURS,
        # Text in the drawings was escaped where they were made.
        still={one.name: [Markup(svg(one, width)) for width in (WIDE, NARROW)] for one in pictures},
        specifications={"config": CONFIG, "pictures": {one.name: specification(one) for one in pictures}},
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return f"{text}\n"


def specification(picture: Picture) -> dict[str, Any]:
    """A picture's Vega-Lite specification, without a title, as wide as its column."""
    return picture.plot | {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}


def svg(picture: Picture, width: int) -> str:
    """A static SVG, `width` pixels wide, for a page whose styles define the roles' colours."""
    plot = specification(picture)
    fit = plot["autosize"] | {"resize": True}  # a legend may take a second row once the width is known
    still = plot | {"width": width, "autosize": fit}
    text = vl_convert.vegalite_to_svg(still, _VERSION, config=CONFIG)
    # Names of clipping paths are their drawing's own; in a page there are several drawings.
    return re.sub(r'(id="|url\(#)(?=clip)', rf"\g<1>{picture.name}-{width}-", text)


@cache
def bundle() -> str:
    """The script of every page: the drawing libraries and the call that starts them."""
    snippet = (_FOLDER / "page.js").read_text(encoding="utf-8")
    return vl_convert.javascript_bundle(snippet, _VERSION)
