"""HTML pages and picture files: self-contained, for light, dark, narrow and print, safe for any record.

A record is somebody's file: its texts are escaped or data, and of scripts a page allows only the one that draws, by its
digest, with nothing from outside. Without that script the same pictures stand still.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zerokit.bench.comparison.cells import baselines, make_cells, side_by_side
from zerokit.bench.record import Record, write_text
from zerokit.bench.record.runs import Run
from zerokit.bench.report.page import page_content
from zerokit.bench.report.pictures import NARROW, Picture, make_pictures
from zerokit.bench.report.theme import COLOURS, CONFIG, colour, in_light

WIDE = 560  # pixels, of a picture's column on a desk: text keeps its size, so a still picture is drawn for its width
_VERSION = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
_FOLDER = Path(__file__).parent


def write_comparison(runs: Sequence[Run], path: Path) -> None:
    """The page of several runs; the first is the baseline."""
    write_text(render(runs), path)


def plots(records: Sequence[Record]) -> dict[str, bytes]:
    """PNG files by name; pictures without enough figures are left out."""
    runs = [Run("", tuple(records))]
    cells = make_cells(runs)
    return {f"{one.name}.png": png(one) for one in make_pictures(cells, baselines(cells, runs))}


def render(runs: Sequence[Run]) -> str:
    """The page's HTML."""
    cells = make_cells(runs)
    partners = baselines(cells, runs)
    cells = side_by_side(cells, partners)
    return document(
        "page.html.jinja", make_pictures(cells, partners), page=page_content(cells, partners, runs)
    )


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
    """A static SVG for a page whose styles define the roles' colours."""
    text = vl_convert.vegalite_to_svg(_still(specification(picture), width), _VERSION, config=CONFIG)
    # Names of clipping paths are their drawing's own; in a page there are several drawings.
    return re.sub(r'(id="|url\(#)(?=clip)', rf"\g<1>{picture.name}-{width}-", text)


def png(picture: Picture) -> bytes:
    """A static PNG in light colours, with its title."""
    config = CONFIG | {"background": colour("ground"), "padding": 12}
    drawing = _still(specification(picture) | {"title": {"text": picture.title}, "config": config}, WIDE)
    return bytes(vl_convert.vegalite_to_png(in_light(json.dumps(drawing)), _VERSION, scale=2))


def _still(plot: Mapping[str, Any], width: int) -> dict[str, Any]:
    """`width` pixels wide as a whole."""
    fit = plot["autosize"] | {"resize": True}  # a legend may take a second row once the width is known
    return dict(plot) | {"width": width, "autosize": fit}


@cache
def bundle() -> str:
    """The script of every page: the drawing libraries and the call that starts them."""
    snippet = (_FOLDER / "page.js").read_text(encoding="utf-8")
    return vl_convert.javascript_bundle(snippet, _VERSION)
