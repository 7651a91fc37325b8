"""Kinds of pictures as Vega-Lite specifications, from plain numbers: bars, strips of steps, points, curves.

A specification has no width: the page gives it that of its column, a file one of its own. What has to fit beside a plot
at any width (the figures after a bar, the names of curves) is given its room in pixels, from the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import altair as alt

from zerokit.bench.record.statistics import quantile
from zerokit.bench.report.theme import colour

HOVER = "hover"  # the layer that is there to be pointed at: a picture without scripts leaves it out
NARROW = 350  # pixels: the narrowest column that a picture has to fit, that of a telephone
DOTS = 300
"""Of a strip, and points of a curve: more cannot be told apart, and make a page heavy."""
_HEIGHT = 270.0
_BAR = 14
# Labels up to this width stand beside their bars, longer ones above.
_BESIDE = 112.0
_NAME = 150.0
# A low-discrepancy sequence spreads dots evenly and the same every time.
_JITTER = alt.ExprRef(f"((datum.step * 0.6180339887) % 1 - 0.5) * {_BAR}")
_FORMAT = ",.4~g"
_Box = tuple[float, float, float, float]
_Area = tuple[list[float], list[float], float, float]  # both axes' domains, pixels across, and free beside

Plot = dict[str, Any]
"""A specification."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar; `error` is half of its interval."""

    name: str
    value: float
    role: str
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One bar: its pieces from left to right, `text` at its end, and `extra` at the right in its own colour.

    `error` draws a whisker around the end, `mark` a tick at a value of its own, `under` a thin bar below.
    """

    label: str
    parts: Sequence[Part]
    text: str
    extra: str = ""
    extra_role: str = "muted"
    error: float = 0.0
    mark: float | None = None
    under: Part | None = None


def bars(rows: Sequence[Row], unit: str, legend: Mapping[str, str] | None = None) -> Plot:
    """Horizontal bars from zero, one a row; `legend` has names and roles of parts that no label explains."""
    parts, thin, ends = [], [], list[dict[str, Any]]()
    for row in rows:
        end = 0.0
        for part in row.parts:
            parts.append(_part(row, part, end))
            end += part.value
        thin += [_part(row, row.under, 0.0)] if row.under is not None else []
        ends.append(
            {"cell": row.label, "low": max(end - row.error, 0.0), "high": end + row.error, "mark": row.mark}
            | {"end": max(end + row.error, row.mark or 0.0), "text": row.text, "extra": row.extra}
            | {"colour": colour("text" if row.parts else "muted"), "beside": colour(row.extra_role)}
        )
    room, extras = (max(text_width(row[name]) for row in ends) for name in ("text", "extra"))
    reach = max(row["end"] for row in ends) or 1.0
    scale = _scale([0, reach], 0, 7 + room + (12 + extras if extras else 0.0))
    y, finish = _labelled([row.label for row in rows])

    def x(field: str) -> alt.X:
        return alt.X(field, type="quantitative", axis=None, scale=scale)

    shades: dict[str, Any] = {"field": "colour", "scale": None}
    if legend:
        # In one row, or two names a row where a page is narrow.
        columns = f"width < {sum(text_width(name) + 36 for name in legend):.0f} ? 2 : {len(legend)}"
        shades = {"field": "part", "scale": _shades(legend)}
        shades["legend"] = alt.Legend(columns=alt.ExprRef(columns))
    fill = alt.Color(type="nominal", **shades)
    known = {"error": "±"} if any(part["error"] is not None for part in parts) else {}
    told = [alt.Tooltip("part:N"), *_told("cell", value=unit, **known)]
    bar = {"y": y, "x": x("start"), "x2": alt.X2("stop"), "color": fill, "tooltip": told}
    texts = _chart(ends).mark_text(align="left", dx=7)
    own, beside = (alt.Color(f"{field}:N", scale=None) for field in ("colour", "beside"))
    layers: list[Any] = [_chart(parts).mark_bar(size=_BAR).encode(**bar)]
    layers.append(texts.encode(y=y, x=x("end"), text="text:N", color=own))
    if thin:
        layers.append(_chart(thin).mark_bar(size=3, yOffset=_BAR / 2 + 3).encode(**bar))
    if whiskers := [row for row in ends if row["high"] > row["low"]]:
        whisker = _chart(whiskers).mark_errorbar(ticks={"size": 6}, color=colour("text"), thickness=1.25)
        layers.append(whisker.encode(y=y, x=x("low"), x2="high:Q"))
    if marks := [row for row in ends if row["mark"] is not None]:
        layers.append(_tick(marks).encode(y=y, x=x("mark")))
    if extras:
        texts = _chart(ends).mark_text(align="right")
        layers.append(texts.encode(y=y, x=alt.value("width"), text="extra:N", color=beside))
    return finish(*layers)


def _part(row: Row, part: Part, start: float) -> dict[str, Any]:
    found = {"cell": row.label, "part": part.name, "value": part.value, "error": part.error}
    return found | {"start": start, "stop": start + part.value, "colour": colour(part.role)}


@dataclass(frozen=True, slots=True)
class Strip:
    """The values of one row in their order."""

    label: str
    values: Sequence[float]
    role: str
    text: str


def strips(rows: Sequence[Strip], unit: str) -> Plot:
    """Values as dots above a common axis, with the median and the range that holds 80 %.

    Those far beyond the rest are drawn at the edge and counted there.
    """
    least, most = min(min(row.values) for row in rows), max(max(row.values) for row in rows)
    typical = max(quantile(row.values, 0.9) for row in rows)
    limit = most if most <= least + 1.8 * (typical - least) else least + 1.5 * (typical - least)
    low, high = (least, limit) if limit > least else (0.9 * least, 1.1 * least or 1.0)
    ends, dots = list[dict[str, Any]](), []
    for row in rows:
        beyond = sum(value > high for value in row.values)
        text = row.text + (f" (+{beyond} ▸)" if beyond else "")
        names = ("low", 0.1), ("median", 0.5), ("high", 0.9)
        quantiles = {name: quantile(row.values, fraction) for name, fraction in names}
        ends.append({"cell": row.label, "text": text, **quantiles})
        steps = range(0, len(row.values), -(-len(row.values) // DOTS))
        values = [float(f"{row.values[step]:.5g}") for step in steps]
        dots.append({"cell": row.label, "step": list(steps), "value": values})
    scale = _scale([low, high], 4, 12 + max(text_width(row["text"]) for row in ends), clamp=True)
    axis = alt.Axis(title=unit, titleAnchor="end", tickCount=alt.ExprRef("max(2, width / 90)"))
    fill = alt.Color("cell:N", scale=_shades({row.label: row.role for row in rows}), legend=None)
    y, finish = _labelled([row.label for row in rows])

    def x(field: str) -> alt.X:
        return alt.X(field, type="quantitative", axis=axis, scale=scale)

    summary = _told("cell", **{name: name for name, _ in names})
    opacity = max(0.2, min(0.6, 12.0 / max(len(row.values) for row in rows)))
    each = _chart(dots).transform_flatten(["step", "value"])
    dot, band = (
        each.mark_circle(size=14, opacity=opacity, yOffset=_JITTER),
        _chart(ends).mark_bar(size=_BAR + 4),
    )
    text = _chart(ends).mark_text(align="right")
    return finish(
        band.encode(y=y, x=x("low"), x2="high:Q", color=fill, opacity=alt.value(0.16)),
        dot.encode(y=y, x=x("value"), color=fill, tooltip=_told("cell", step="step", value=unit)),
        _tick(ends).encode(y=y, x=x("median"), tooltip=summary),
        text.encode(y=y, x=alt.value("width"), text="text:N"),
    )


@dataclass(frozen=True, slots=True)
class Point:
    """One place in a plane; `front` points are filled and joined by a line."""

    x: float
    y: float
    label: str
    role: str
    front: bool


def scatter(points: Sequence[Point], x_title: str, y_title: str) -> Plot:
    """Labelled points; neither axis starts at zero, because places beside each other are what is looked at."""
    xs, ys = (_padded([getattr(point, axis) for point in points], 0.12) for axis in "xy")
    x = alt.X("x:Q", scale=alt.Scale(domain=xs, nice=False), axis=_axis(x_title))
    y = alt.Y("y:Q", scale=alt.Scale(domain=ys, nice=False), axis=_axis())
    points = sorted(points, key=lambda point: not point.front)
    rows = [asdict(one) | {"colour": colour(one.role), "name": one.label} for one in points]
    tries = [(10, 0, "left"), (-10, 0, "right"), (0, -15, "center"), (0, 15, "center")]
    tries += [(dx, dy, align) for dy in (-14, 14, -28, 28) for dx, align in ((6, "left"), (-6, "right"))]
    line = _chart([row for row in rows if row["front"]]).mark_line(strokeDash=[3, 3], strokeWidth=1.5)
    dots = _chart(rows).mark_point(size=90, strokeWidth=1.75, opacity=1)
    own: dict[str, Any] = {"field": "colour", "type": "nominal", "scale": None}
    fill = alt.condition("datum.front", alt.Fill(**own), alt.value(colour("ground")))
    told = _told("label", x=x_title, y=y_title)
    return _finished(
        line.encode(x=x, y=y, color=alt.value(colour("soft"))),
        dots.encode(x=x, y=y, stroke=alt.Stroke(**own), fill=fill, tooltip=told),
        *_names(_placed(rows, tries, (xs, ys, NARROW - 56.0, 0.0)), x, y, alt.value(colour("text"))),
    )


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve, and the name at its end (none: none); `label` says what it is when it is pointed at."""

    label: str
    points: Sequence[tuple[float, float]]
    role: str
    name: str = ""
    dashed: bool = False


def curves(
    rows: Sequence[Curve], x_title: str, y_title: str, ticks: Sequence[float] = (), form: str = _FORMAT
) -> Plot:
    """Curves with their names at their ends; `form` writes the values of the y axis.

    With `ticks` each value is a point of its own, the y axis begins at zero, and the x axis has these values. Without,
    what is between may be of interest too, and can be zoomed into.
    """
    ys = _padded([y for row in rows for _, y in row.points], 0.04)
    ys = [0.0, ys[1]] if ticks else ys
    ends = [
        {"cell": row.label, "name": row.name} | dict(zip("xy", row.points[-1], strict=True))
        for row in rows
        if row.name
    ]
    widths = [text_width(line) for row in rows for line in _lines(row.name)]
    room = 12 + min(max(widths, default=0.0), _NAME)
    lanes = [0, *(side * step for step in range(8, int(_HEIGHT), 8) for side in (-1, 1))]
    values = [x for row in rows for x, _ in row.points]
    xs = [min(values), max(values)]
    far = bool(ticks) and 0 < 8 * ticks[0] <= ticks[-1]
    scale = _scale(xs, 8, room, **({"type": "log", "base": 2, "zero": alt.Undefined} if far else {}))
    places = {"values": list(ticks), "labelExpr": "format(datum.value, ',~g')"} if ticks else {}
    x = alt.X("x:Q", scale=scale, axis=_axis(x_title, **places))
    y = alt.Y("y:Q", scale=alt.Scale(domain=ys, nice=False), axis=_axis(format=form))
    fill = alt.Color("cell:N", scale=_shades({row.label: row.role for row in rows}), legend=None)
    data = [{"cell": row.label, "dashed": row.dashed, "at": [list(at) for at in row.points]} for row in rows]
    each = _chart(data).transform_flatten(["at"]).transform_calculate(x="datum.at[0]", y="datum.at[1]")
    dash = alt.condition("datum.dashed", alt.value([4, 4]), alt.value([1, 0]))
    line = each.mark_line(clip=True, strokeWidth=2 if ticks else 1.5)
    names = _placed(ends, [(8, dy, "left") for dy in lanes], (xs, ys, NARROW - 48.0 - room, room))
    told = [*_told("cell", x=x_title), alt.Tooltip("y:Q", title=y_title, format=form)]
    near = alt.selection_point(on="pointerover", clear="pointerout", empty=False, name="near")
    seen = alt.value(1) if ticks else alt.condition(near, alt.value(0.4), alt.value(0))
    dots = each.encode(x=x, y=y, color=fill, opacity=seen, tooltip=told).mark_circle(
        size=45 if ticks else 250
    )
    if not ticks:
        wheel = "wheel![event.ctrlKey || event.metaKey]"  # the wheel alone moves the page
        zoom = alt.selection_interval(bind="scales", zoom=wheel, name="zoom")
        dots = dots.properties(name=HOVER).add_params(near, zoom)
    return _finished(line.encode(x=x, y=y, color=fill, strokeDash=dash), *_names(names, x, y, fill), dots)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """An even share of a curve's points, the last one included."""
    every = -(-len(points) // DOTS)
    return list(points[(len(points) - 1) % every :: every]) if points else []


def text_width(text: str) -> float:
    """About how wide a text of 12 pixels will be."""
    return 6.84 * len(text)


def _lines(name: str) -> list[str]:
    """A long name with each of its parts on a line of its own."""
    return name.split(" · ") if text_width(name) > _BESIDE else [name]


def _placed(rows: Sequence[Plot], tries: Sequence[tuple[float, float, str]], area: _Area) -> list[Plot]:
    """Labels beside their points, the first of `tries` where nothing else is; none where there is no free place.

    Places are looked for at the narrowest width: at any other, points are further apart and the labels no longer.
    """
    xs, ys, width, room = area
    middles = [
        (
            (row["x"] - xs[0]) / ((xs[1] - xs[0]) or 1.0) * width,
            (ys[1] - row["y"]) / (ys[1] - ys[0]) * _HEIGHT,
        )
        for row in rows
    ]
    taken: list[_Box] = [(x - 6, y - 6, x + 6, y + 6) for x, y in middles]
    found = []
    for row, (x, y) in zip(rows, middles, strict=True):
        lines = _lines(row["name"])
        across, tall = min(max(map(text_width, lines)), _NAME), 7.5 * len(lines)
        for dx, dy, align in tries:
            left = x + dx - {"left": 0.0, "center": across / 2, "right": across}[align]
            box = (left, y + dy - tall, left + across, y + dy + tall)
            inside = box[0] >= 0 and box[2] <= width + room and box[1] >= -8 and box[3] <= _HEIGHT + 8
            apart = (box[2] <= a or c <= box[0] or box[3] <= b or d <= box[1] for a, b, c, d in taken)
            if inside and all(apart):
                taken.append(box)
                found.append({**row, "name": lines, "dx": dx, "dy": dy - tall + 7.5, "align": align})
                break
    return found


def _names(rows: Sequence[Mapping[str, Any]], x: alt.X, y: alt.Y, fill: Any) -> list[alt.Chart]:
    """Labels as `_placed` has placed them, above a rim that keeps them readable where they cross a line."""
    mark: dict[str, Any] = {name: alt.ExprRef(f"datum.{name}") for name in ("dx", "dy", "align")}
    mark |= {"baseline": "middle", "limit": _NAME, "lineHeight": 15}
    rim = _chart(rows).mark_text(**mark, stroke=colour("ground"), strokeWidth=4, strokeJoin="round")
    names = _chart(rows).mark_text(**mark).encode(x=x, y=y, text="name:N", color=fill)
    return [rim.encode(x=x, y=y, text="name:N"), names]


def _labelled(labels: Sequence[str]) -> tuple[alt.Y, Callable[..., Plot]]:
    """The axis of rows, and what makes a picture of their layers.

    Labels stand beside the rows, or above where a narrow page has no room for them.
    """
    above = max(map(text_width, labels)) > _BESIDE
    look: dict[str, Any] = {
        "labelFontSize": 12,
        "labelLimit": 0,
        "labelColor": colour("text"),
        "domainColor": colour("soft"),
    }
    axis = alt.Axis(title=None, grid=False, domain=True, labels=not above, **look)
    y = alt.Y("cell:N", axis=axis, scale=alt.Scale(domain=list(labels), paddingInner=0, paddingOuter=0))
    rows = _chart([{"cell": label} for label in labels])
    texts = rows.mark_text(align="left", dx=2, dy=-15, limit=alt.ExprRef("width"))

    def finish(*layers: Any) -> Plot:
        own = [texts.encode(y=y, x=alt.value(0), text="cell:N")] if above else []
        return _finished(*layers, *own, height=alt.Step(44 if above else 26))

    return y, finish


def _finished(*layers: Any, height: Any = _HEIGHT) -> Plot:
    return alt.layer(*layers).properties(height=height).to_dict()


def _chart(rows: Sequence[Mapping[str, Any]]) -> alt.Chart:
    chart: alt.Chart = alt.Chart(alt.InlineData(values=[dict(row) for row in rows]))
    return chart


def _tick(rows: Sequence[Mapping[str, Any]]) -> Any:
    return _chart(rows).mark_tick(size=_BAR + 6, thickness=2, color=colour("text"))


def _told(name: str, **titles: str) -> list[alt.Tooltip]:
    """What is pointed at, as the heading of these numbers of it, each with its title."""
    numbers = [alt.Tooltip(f"{field}:Q", title=title, format=_FORMAT) for field, title in titles.items()]
    return [alt.Tooltip(f"{name}:N", title="title"), *numbers]


def _scale(domain: Sequence[float], left: float, right: float, **options: Any) -> alt.Scale:
    """A horizontal scale that leaves so many pixels free at its sides, at any width."""
    rest = alt.ExprRef(f"max(width - {right:.0f}, 20)")
    return alt.Scale(domain=list(domain), range=[left, rest], nice=False, **({"zero": False} | options))


def _shades(roles: Mapping[str, str]) -> alt.Scale:
    return alt.Scale(domain=list(roles), range=[colour(role) for role in roles.values()])


def _axis(title: str | None = None, **options: Any) -> alt.Axis:
    """The horizontal one has a title, the vertical one a grid."""
    options.setdefault("tickCount", alt.ExprRef(f"max(2, {'width / 70' if title else 'height / 45'})"))
    return alt.Axis(title=title, titleAnchor="end", grid=not title, **options)


def _padded(values: Sequence[float], share: float) -> list[float]:
    """A domain around values, not below zero where no value is."""
    low, high = min(values), max(values)
    pad = share * (high - low) or 0.1 * abs(high) or 1.0
    return [max(low - pad, 0.0) if low >= 0 else low - pad, high + pad]
