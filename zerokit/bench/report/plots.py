"""Kinds of pictures as Vega-Lite specifications, from plain numbers: bars, strips of steps, points, curves.

A specification has no width: the page gives it that of its column, a file one of its own. What has to fit beside a plot
at any width (the figures after a bar, the names of curves) is given its room in pixels, from the length of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import altair as alt

from zerokit.bench.record.statistics import quantile
from zerokit.bench.report.labels import BESIDE, HEIGHT, NAME, lines_of, place_labels, text_width
from zerokit.bench.report.theme import colour

HOVER = "hover"  # the layer that is there to be pointed at: a picture without scripts leaves it out
NARROW = 350  # pixels: the narrowest column that a picture has to fit, that of a telephone
DOTS = 300
"""The most dots of a strip and points of a curve: more cannot be distinguished and make a page heavy."""
_BAR = 14
# A low-discrepancy sequence spreads dots evenly and the same every time.
_JITTER = alt.ExprRef(f"((datum.x * 0.6180339887) % 1 - 0.5) * {_BAR}")
_FORMAT = ",.4~g"
_OWN = alt.Color("colour:N", scale=None)

Plot = dict[str, Any]
"""A specification, or a row of its data."""
Part = tuple[str, float, str]
"""A piece of a bar: its name, its value and its role."""


@dataclass(frozen=True, slots=True)
class Row:
    """One bar: its pieces from left to right, `text` at its end, and `extra` at the right in its own colour.

    `error` is half of the interval of the last piece, drawn as a whisker around the end; `mark` draws a tick at a value
    of its own, `under` a thin bar below.
    """

    label: str
    parts: Sequence[Part]
    text: str
    extra: str = ""
    extra_role: str = "muted"
    error: float = 0.0
    mark: float | None = None
    under: Part | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one cell: of a curve or a strip in their order, or a single one.

    `name` stands beside them (none: none); `marked` fills a point, and dashes a curve.
    """

    label: str
    points: Sequence[tuple[float, float]]
    role: str
    name: str = ""
    marked: bool = False

    def row(self, **more: object) -> Plot:
        """As data, with more columns."""
        return {
            "cell": self.label,
            "name": self.name,
            "marked": self.marked,
            "colour": colour(self.role),
        } | more


@dataclass(frozen=True, slots=True)
class Band:
    """Amounts on each other in the course of something: at each x from 0 to 1, one of every kind.

    `text` stands at the right above; at each of `borders` something else begins.
    """

    label: str
    points: Sequence[tuple[float, Sequence[float]]]
    text: str
    borders: Sequence[float] = ()


def bars(rows: Sequence[Row], unit: str, legend: Mapping[str, str] | None = None) -> Plot:
    """Horizontal bars from zero, one a row; `legend` has names and roles of parts that no label explains."""

    def piece(row: Row, part: Part, place: int = 0) -> Plot:
        name, value, role = part
        error = row.error or None if part is row.parts[-1] else None
        own = {"cell": row.label, "part": name, "value": value, "error": error}
        return own | {"place": place, "colour": colour(role)}

    pieces = [piece(row, part, place) for row in rows for place, part in enumerate(row.parts)]
    thin = [piece(row, row.under) for row in rows if row.under is not None]
    ends: list[Plot] = []
    for row in rows:
        end = sum(value for _, value, _ in row.parts)
        own = {"cell": row.label, "text": row.text, "extra": row.extra, "mark": row.mark}
        own |= {"low": max(end - row.error, 0.0), "high": end + row.error}
        own |= {"end": max(end + row.error, row.mark or 0.0), "beside": colour(row.extra_role)}
        ends.append(own | {"colour": colour("text" if row.parts else "muted")})
    room, extras = (max(text_width(row[name]) for row in ends) for name in ("text", "extra"))
    reach = max(row["end"] for row in ends) or 1.0
    scale = _scale([0, reach], 0, 7 + room + (12 + extras if extras else 0.0))
    known = {"error": "±"} if any(row.error for row in rows) else {}
    fill = _OWN
    if legend:
        fill = _shades(legend)

    def x(field: str, stack: Any = None) -> alt.X:
        return alt.X(field, type="quantitative", axis=None, scale=scale, stack=stack)

    about: dict[str, Any] = {
        "color": fill,
        "tooltip": [alt.Tooltip("part:N"), *_told("cell", value=unit, **known)],
    }
    layers = [
        _chart(pieces).mark_bar(size=_BAR).encode(x=x("value", "zero"), order="place:Q", **about),
        _chart(ends).mark_text(align="left", dx=7).encode(x=x("end"), text="text:N", color=_OWN),
        _chart(thin).mark_bar(size=3, yOffset=_BAR / 2 + 3).encode(x=x("value"), **about),
        _chart([row for row in ends if row["high"] > row["low"]])
        .mark_errorbar(ticks={"size": 6}, color=colour("text"), thickness=1.25)
        .encode(x=x("low"), x2="high:Q"),
        _tick([row for row in ends if row["mark"] is not None]).encode(x=x("mark")),
        _chart([row for row in ends if row["extra"]])
        .mark_text(align="right")
        .encode(x=alt.value("width"), text="extra:N", color=alt.Color("beside:N", scale=None)),
    ]
    return _labelled([row.label for row in rows], layers)


def strips(rows: Sequence[Series], middles: Sequence[float], unit: str) -> Plot:
    """Values as dots above a common axis, with a tick at each row's middle and the range that holds 80 %.

    Those far beyond the rest are drawn at the edge and counted there.
    """
    values = [[y for _, y in row.points] for row in rows]
    least, most = min(map(min, values)), max(map(max, values))
    typical = max(quantile(own, 0.9) for own in values)
    limit = most if most <= least + 1.8 * (typical - least) else least + 1.5 * (typical - least)
    low, high = (least, limit) if limit > least else (0.9 * least, 1.1 * least or 1.0)
    shown = ("low", "p50", "high")
    ends = []
    for row, own, middle in zip(rows, values, middles, strict=True):
        beyond = sum(value > high for value in own)
        quantiles = {"low": quantile(own, 0.1), "p50": middle, "high": quantile(own, 0.9)}
        ends.append(row.row(name=row.name + (f" (+{beyond} ▸)" if beyond else ""), **quantiles))
    scale = _scale([low, high], 4, 12 + max(text_width(row["name"]) for row in ends), clamp=True)
    axis = alt.Axis(title=unit, titleAnchor="end", tickCount=alt.ExprRef("max(2, width / 90)"))

    def x(field: str) -> alt.X:
        return alt.X(field, type="quantitative", axis=axis, scale=scale)

    opacity = max(0.2, min(0.6, 12.0 / max(map(len, values))))
    told = _told("cell", x="step", y=unit)
    layers = [
        _chart(ends).mark_bar(size=_BAR + 4, opacity=0.16).encode(x=x("low"), x2="high:Q", color=_OWN),
        _flat(rows)
        .mark_circle(size=14, opacity=opacity, yOffset=_JITTER)
        .encode(x=x("y"), color=_OWN, tooltip=told),
        _tick(ends).encode(x=x("p50"), tooltip=_told("cell", **{name: name for name in shown})),
        _chart(ends).mark_text(align="right").encode(x=alt.value("width"), text="name:N"),
    ]
    return _labelled([row.label for row in rows], layers)


def bands(rows: Sequence[Band], across: str, legend: Mapping[str, str]) -> Plot:
    """Bands of stacked areas, all of one scale; `legend` has the kinds from below, each with its role."""
    reach = max(sum(amounts) for row in rows for _, amounts in row.points) or 1.0
    # The label stands above its band, and the text beside it, or below where a narrow page has no room for both.
    below = any(text_width(row.label) + text_width(row.text) + 12 > NARROW for row in rows)
    tall, gap = 64, 48 if below else 32  # pixels
    step = reach * (tall + gap) / tall
    areas, wholes, ends, borders = [], [], [], []
    for number, row in enumerate(reversed(rows)):
        base = step * number
        stacks = [(x, [base, *(base + up for up in accumulate(amounts))]) for x, amounts in row.points]
        for kind, part in enumerate(legend):
            at = [_short(x, stack[kind], stack[kind + 1]) for x, stack in stacks]
            areas.append({"cell": row.label, "part": part, "at": at})
        wholes.append({"cell": row.label, "at": [_short(x, base, *amounts) for x, amounts in row.points]})
        ends.append({"cell": row.label, "text": row.text, "y": base + reach})
        borders += [{"x": x, "y": base, "high": base + reach} for x in row.borders]
    scale = alt.Scale(domain=[0.0, step * len(rows)], nice=False)
    x = alt.X("x:Q", scale=alt.Scale(domain=[0.0, 1.0], nice=False), axis=_axis(across, format=".0%"))
    y, high = alt.Y("y:Q", scale=scale, axis=None), alt.Y2("high:Q")
    taken = {"x": "datum.at[0]", "y": "datum.at[1]"}
    amounts = {f"n{kind}": f"datum.at[{kind + 2}]" for kind in range(len(legend))}
    told = _told("cell", x=across, **dict(zip(amounts, legend, strict=True)))
    label, text = alt.value(0), alt.value(0 if below else "width")
    return _finished(
        _chart(areas)
        .transform_flatten(["at"])
        .transform_calculate(**taken, high="datum.at[2]")
        .mark_area()
        .encode(x=x, y=y, y2=high, detail="cell:N", color=_shades(legend)),
        _chart(borders)
        .mark_rule(strokeDash=[3, 3], color=colour("text"), opacity=0.5)
        .encode(x=x, y=y, y2=high),
        _chart(ends).mark_text(align="left", dy=16 - gap).encode(x=label, y=y, text="cell:N"),
        _chart(ends)
        .mark_text(align="left" if below else "right", dy=-16)
        .encode(x=text, y=y, text="text:N", color=alt.value(colour("muted" if below else "text"))),
        _chart(wholes)
        .transform_flatten(["at"])
        .transform_calculate(**taken, **amounts, high=f"datum.at[1] + {reach}")
        .mark_bar(size=8, opacity=0)
        .encode(x=x, y=y, y2=high, tooltip=told)
        .properties(name=HOVER),
        height=(tall + gap) * len(rows),
    )


def scatter(points: Sequence[Series], x_title: str, y_title: str) -> Plot:
    """Labelled points. The x axis starts at zero; the y axis does not, so that points lie apart."""
    rows = [
        point.row(x=x, y=y, name=point.label)
        for point in sorted(points, key=lambda point: not point.marked)
        for x, y in point.points
    ]
    xs, ys = (_padded([row[axis] for row in rows], 0.12) for axis in "xy")
    xs[0] = 0.0
    x = alt.X("x:Q", scale=alt.Scale(domain=xs, nice=False), axis=_axis(x_title))
    y = alt.Y("y:Q", scale=alt.Scale(domain=ys, nice=False), axis=_axis())
    tries = [(10, 0, "left"), (-10, 0, "right"), (0, -15, "center"), (0, 15, "center")]
    tries += [(dx, dy, align) for dy in (-14, 14, -28, 28) for dx, align in ((6, "left"), (-6, "right"))]
    names = place_labels(rows, tries, (xs, ys, NARROW - 56.0, 0.0))
    fill = alt.condition("datum.marked", alt.Fill("colour:N", scale=None), alt.value(colour("ground")))
    return _finished(
        _chart([row for row in rows if row["marked"]])
        .mark_line(strokeDash=[3, 3], strokeWidth=1.5, color=colour("soft"))
        .encode(x=x, y=y),
        _chart(rows)
        .mark_point(size=90, strokeWidth=1.75, opacity=1)
        .encode(
            x=x,
            y=y,
            stroke=alt.Stroke("colour:N", scale=None),
            fill=fill,
            tooltip=_told("cell", x=x_title, y=y_title),
        ),
        *_names([row | {"colour": colour("text")} for row in names], x, y),
    )


def curves(
    rows: Sequence[Series],
    x_title: str,
    y_title: str,
    ticks: Sequence[float] = (),
    form: str = _FORMAT,
    *,
    from_zero: bool = False,
) -> Plot:
    """Curves with their names at their ends; `form` writes the values of the y axis, which `from_zero` begins at zero.

    With `ticks` each value is a point of its own, the y axis begins at zero, and the x axis has these values. Without,
    what is between may be of interest too, and can be zoomed into.
    """
    ys = _padded([y for row in rows for _, y in row.points], 0.04)
    ys = [0.0, ys[1]] if ticks or from_zero else ys
    values = [x for row in rows for x, _ in row.points]
    xs = [min(values), max(values)]
    room = 12 + min(max(text_width(line) for row in rows for line in lines_of(row.name)), NAME)
    far = bool(ticks) and 0 < 8 * ticks[0] <= ticks[-1]
    scale = _scale(xs, 8, room, **({"type": "log", "base": 2, "zero": alt.Undefined} if far else {}))
    places = {"values": list(ticks), "labelExpr": "format(datum.value, ',~g')"} if ticks else {}
    x = alt.X("x:Q", scale=scale, axis=_axis(x_title, **places))
    y = alt.Y("y:Q", scale=alt.Scale(domain=ys, nice=False), axis=_axis(format=form))
    each = _flat(rows).encode(x=x, y=y, color=_OWN)
    dash = alt.condition("datum.marked", alt.value([4, 4]), alt.value([1, 0]))
    line = each.mark_line(clip=True, strokeWidth=2 if ticks else 1.5)
    ends = [row.row(x=row.points[-1][0], y=row.points[-1][1]) for row in rows if row.name]
    lanes = [0, *(side * step for step in range(8, HEIGHT, 8) for side in (-1, 1))]
    names = place_labels(ends, [(8, lane, "left") for lane in lanes], (xs, ys, NARROW - 48.0 - room, room))
    told = [*_told("cell", x=x_title), alt.Tooltip("y:Q", title=y_title, format=form)]
    dots = each.mark_circle(size=45 if ticks else 250).encode(tooltip=told)
    if not ticks:
        near = alt.selection_point(on="pointerover", clear="pointerout", empty=False, name="near")
        wheel = "wheel![event.ctrlKey || event.metaKey]"  # the wheel alone moves the page
        zoom = alt.selection_interval(bind="scales", zoom=wheel, name="zoom")
        seen = alt.condition(near, alt.value(0.4), alt.value(0))
        dots = dots.encode(opacity=seen).properties(name=HOVER).add_params(near, zoom)
    return _finished(line.encode(detail="cell:N", strokeDash=dash), *_names(names, x, y), dots)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """An even share of a curve's points, the last one included."""
    every = -(-len(points) // DOTS)
    return list(points[(len(points) - 1) % every :: every]) if points else []


def _names(rows: Sequence[Plot], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Labels as `place_labels` has placed them, above a rim that keeps them readable where they cross a line."""
    mark: dict[str, Any] = {name: alt.ExprRef(f"datum.{name}") for name in ("dx", "dy", "align")}
    mark |= {"baseline": "middle", "limit": NAME, "lineHeight": 15}
    texts = _chart(rows).encode(x=x, y=y, text="name:N")
    rim = texts.mark_text(**mark, stroke=colour("ground"), strokeWidth=4, strokeJoin="round")
    return [rim, texts.mark_text(**mark).encode(color=_OWN)]


def _labelled(labels: Sequence[str], layers: Iterable[alt.Chart]) -> Plot:
    """Layers over rows, whose labels stand beside them, or above where a narrow page has no room for them."""
    above = max(map(text_width, labels)) > BESIDE
    look: dict[str, Any] = {"labelFontSize": 12, "labelLimit": 0, "labelColor": colour("text")}
    axis = alt.Axis(title=None, grid=False, domain=True, domainColor=colour("soft"), labels=not above, **look)
    y = alt.Y("cell:N", axis=axis, scale=alt.Scale(domain=list(labels), paddingInner=0, paddingOuter=0))
    layers = [layer.encode(y=y) for layer in layers if layer.data.values]
    if above:
        texts = _chart([{"cell": label} for label in labels]).encode(y=y, x=alt.value(0), text="cell:N")
        layers.append(texts.mark_text(align="left", dx=2, dy=-15, limit=alt.ExprRef("width")))
    # A step as the height would be one, but Vega-Lite then warns of fitting that nobody asked for.
    return _finished(*layers, height=len(labels) * (44 if above else 26))


def _shades(legend: Mapping[str, str]) -> alt.Color:
    """Parts in their colours, named in one row, or two a row where a page is narrow."""
    columns = f"width < {sum(text_width(name) + 36 for name in legend):.0f} ? 2 : {len(legend)}"
    shades = alt.Scale(domain=list(legend), range=[colour(role) for role in legend.values()])
    return alt.Color("part:N", scale=shades, legend=alt.Legend(columns=alt.ExprRef(columns)))


def _short(*values: float) -> list[float]:
    """With the digits that a picture can show."""
    return [float(f"{value:.5g}") for value in values]


def _finished(*layers: Any, height: int = HEIGHT) -> Plot:
    return alt.layer(*layers).properties(height=height).to_dict()


def _chart(rows: Sequence[Plot]) -> Any:
    return alt.Chart(alt.InlineData(values=list(rows)))


def _flat(rows: Sequence[Series]) -> Any:
    """A row a point, from data that name each cell once; of many points an even share."""
    data = _chart([row.row(at=[list(at) for at in thinned(row.points)]) for row in rows])
    return data.transform_flatten(["at"]).transform_calculate(x="datum.at[0]", y="datum.at[1]")


def _tick(rows: Sequence[Plot]) -> Any:
    return _chart(rows).mark_tick(size=_BAR + 6, thickness=2, color=colour("text"))


def _told(name: str, **titles: str) -> list[alt.Tooltip]:
    """What is pointed at, as the heading of these numbers of it, each with its title."""
    numbers = [alt.Tooltip(f"{field}:Q", title=title, format=_FORMAT) for field, title in titles.items()]
    return [alt.Tooltip(f"{name}:N", title="title"), *numbers]


def _scale(domain: Sequence[float], left: float, right: float, **options: Any) -> alt.Scale:
    """A horizontal scale that leaves so many pixels free at its sides, at any width."""
    rest = alt.ExprRef(f"max(width - {right:.0f}, 20)")
    return alt.Scale(domain=list(domain), range=[left, rest], nice=False, **({"zero": False} | options))


def _axis(title: str | None = None, **options: Any) -> alt.Axis:
    """The horizontal one has a title, the vertical one a grid."""
    options.setdefault("tickCount", alt.ExprRef(f"max(2, {'width / 70' if title else 'height / 45'})"))
    return alt.Axis(title=title, titleAnchor="end", grid=not title, **options)


def _padded(values: Sequence[float], share: float) -> list[float]:
    """A domain around values, not below zero where no value is."""
    low, high = min(values), max(values)
    pad = share * (high - low) or 0.1 * abs(high) or 1.0
    return [max(low - pad, 0.0) if low >= 0 else low - pad, high + pad]
