"""The six pictures of cells: throughput, memory, state, steps, communication and loss, each a Vega-Lite specification.

A specification has no width: the page gives it that of its column. Names and figures are labels
of the axis and legends, for which Vega-Lite finds the room.

The look is in `theme.json` beside this module: colours for light and dark, fonts and lines. A specification names a
colour by its role, as `var(--ddp)`: a page's style says what that is in light and in dark, and one drawing follows the
reader's setting. Hues are after Okabe and Ito, which colour-blind people tell apart.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from zerokit.bench.catalogue.engines import label_of
from zerokit.bench.comparison.cells import Cell
from zerokit.bench.comparison.differences import difference
from zerokit.bench.comparison.tables import Scale, having, memory_metric, percent, scale_of, within_noise
from zerokit.bench.record.metrics import MIB, UNITS
from zerokit.bench.record.settings import DIMENSIONS, OPTIONS
from zerokit.bench.record.statistics import quantile, slowest
from zerokit.bench.record.words import title_of, varying

_THEME = json.loads(Path(__file__).with_name("theme.json").read_text(encoding="utf-8"))
COLOURS: dict[str, list[str]] = _THEME["colours"]
CONFIG: dict[str, Any] = _THEME["config"]
"""Vega-Lite's configuration of every picture."""


def colour(role: str) -> str:
    """The name of a role in specifications."""
    return f"var(--{role})"


NARROW = 350  # pixels: the narrowest column that a picture has to fit, that of a telephone
DOTS = 300
"""The most steps of a row and points of a curve: more cannot be distinguished and make a page heavy."""
_LETTER = 6.5  # pixels, of a letter in a legend
_STATE = {"parameters": "first", "gradients": "third", "optimizer": "second", "buffers and buckets": "soft"}
_COMMUNICATION = {"all else": "soft", "communication": "second"}
_OWN = alt.Color("colour:N", scale=None)
_DASHES = [[1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [4, 6]]

Plot = dict[str, Any]
"""A specification, or a row of its data."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: its specification without title and width, and `label`, its text alternative.

    Its note is the template's, by `name`; `told` is what that has to say of these cells.
    """

    name: str
    title: str
    label: str
    plot: Plot
    told: Any = None


@dataclass(frozen=True, slots=True)
class Row:
    """A cell's bar: its parts from left to right with their roles, the text below its name, and a tick at `mark`.

    `error` is half of the interval of the bar's end.
    """

    cell: str
    text: str
    parts: Sequence[tuple[str, float, str]] = ()
    error: float = 0.0
    mark: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of a curve, in order."""

    name: str
    role: str
    points: Sequence[tuple[float, float]]


def make_pictures(cells: Sequence[Cell]) -> list[Picture]:
    """All pictures for which these cells have figures."""
    found: list[Picture | None] = []
    if len(cells) > 1:
        for unit in UNITS:
            found.append(_throughput(cells, unit))
        metric, called = memory_metric(cells)
        found.append(_ranked(cells, metric, called, "memory"))
    found += [_state(cells), _steps(cells), _communication(cells), _loss(cells)]
    return [picture for picture in found if picture is not None]


def _said(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """What a picture shows, as a sentence."""
    return f"{title}: {'; '.join(f'{label} {said}' for label, said in rows)}"


def data_of(rows: Sequence[Plot]) -> alt.Chart:
    """A chart of these rows, with nothing drawn yet."""
    return alt.Chart(alt.Data(values=list(rows)))  # type: ignore[no-untyped-call]


def _finished(chart: Any, **properties: Any) -> Plot:
    plot: Plot = chart.properties(**properties).to_dict()
    plot.pop("config", None)
    return plot


def _rows(names: Sequence[str]) -> tuple[alt.Y, dict[str, Any]]:
    """The axis of cells in this order, each name with its figures below it, and the room for them."""
    lines = "split(datum.label, '\\n')"
    cut = f"[truncate({lines}[0], 32, 'center'), {lines}[1]]"
    axis = alt.Axis(labelExpr=cut, labelLimit=200, labelColor=colour("text"))
    return alt.Y("cell:N", sort=list(names), title=None, axis=axis), {"height": alt.Step(44)}


def draw_bars(
    name: str, title: str, rows: Sequence[Row], scale: Scale, legend: Mapping[str, str] | None = None
) -> Picture:
    """Horizontal bars from zero; `legend` has the names and roles of their parts."""
    parts, ends = list[Plot](), list[Plot]()
    for row in rows:
        own: Plot
        own, end = {"cell": f"{row.cell}\n{row.text}"}, sum(value for _, value, _ in row.parts)
        for place, (part, value, role) in enumerate(row.parts):
            shade = colour((legend or {}).get(part, role))
            parts.append(own | {"part": part, "value": value, "place": place, "colour": shade})
        ends.append(own | {"low": max(end - row.error, 0.0), "high": end + row.error, "mark": row.mark})
    labels = max((len(row.cell) for row in rows), default=0)  # on the left of the legend, in smaller letters
    fill = _legend(legend, NARROW - 5.5 * labels) if legend else _OWN
    y, room = _rows([f"{row.cell}\n{row.text}" for row in rows])
    axis = alt.Axis(title=scale.unit, tickCount=4)
    tooltip = [*_tooltip(part="", value=scale.unit)]
    chart = alt.layer(
        data_of(parts)
        .mark_bar(size=14)
        .encode(
            x=alt.X("value:Q", stack="zero", axis=axis), y=y, color=fill, order="place:Q", tooltip=tooltip
        ),
        data_of([row for row in ends if row["high"] > row["low"]])
        .mark_rule(color=colour("text"), strokeWidth=1.25)
        .encode(x="low:Q", x2="high:Q", y=y),
        data_of([row for row in ends if row["mark"] is not None])
        .mark_tick(size=24, thickness=2, color=colour("text"))
        .encode(x="mark:Q", y=y),
    )
    return Picture(
        name, title, _said(title, ((row.cell, row.text) for row in rows)), _finished(chart, **room)
    )


def _legend(roles: Mapping[str, str], width: float = NARROW, **look: Any) -> alt.Color:
    """Colours by name, and a legend of as many columns as fit `width` pixels."""
    symbol = math.isqrt(look.get("symbolSize", 100))
    columns = max(1, int(width / (14 + symbol + _LETTER * max(map(len, roles), default=1))))
    scale = alt.Scale(domain=list(roles), range=[colour(role) for role in roles.values()])
    return alt.Color(
        "part:N",
        scale=scale,
        legend=alt.Legend(columns=columns, labelExpr="truncate(datum.label, 48, 'center')", **look),
    )


def _tooltip(**titles: str) -> list[alt.Tooltip]:
    return [
        alt.Tooltip(f"{name}:N") if not title else alt.Tooltip(f"{name}:Q", title=title, format=",.4~g")
        for name, title in titles.items()
    ]


def _curved(
    name: str,
    title: str,
    curves: Sequence[Curve],
    x_title: str,
    y_title: str,
    *,
    marked: bool,
    told: Any = None,
) -> Picture:
    """Lines with a legend; `marked` also has a dot at each point, and a y axis from zero."""
    data: list[Plot] = [
        {"part": curve.name, "x": x, "y": y}
        for curve in curves
        for x, y in curve.points[:: math.ceil(len(curve.points) / DOTS)]
    ]
    seen = Counter[str]()
    dashes: dict[str, list[int]] = {}
    for curve in curves:  # those of one colour differ in their dashes
        dashes[curve.name] = _DASHES[seen[curve.role] % len(_DASHES)]
        seen[curve.role] += 1
    every = {"values": sorted({row["x"] for row in data}), "format": ",~g"}
    axis = alt.Axis(**(every if marked else {"tickCount": 5}))
    y = alt.Y("y:Q", title=y_title, scale=alt.Scale(zero=marked), axis=alt.Axis(tickCount=5))
    chart = (
        data_of(data)
        .mark_line(point=marked, strokeWidth=2)
        .encode(
            x=alt.X("x:Q", title=x_title, scale=alt.Scale(nice=False, zero=False), axis=axis),
            y=y,
            color=_legend(
                {curve.name: curve.role for curve in curves},
                symbolType="stroke",
                symbolStrokeWidth=3,
                symbolSize=400,
            ),
            strokeDash=alt.StrokeDash(
                "part:N", scale=alt.Scale(domain=list(dashes), range=[*dashes.values()])
            ),
            tooltip=_tooltip(part="", x=x_title, y=y_title),
        )
    )
    said = []
    for curve in curves:
        values = [f"{y:,.4g} at {x:,.4g}" for x, y in curve.points]
        said.append((curve.name, ", ".join(values if len(values) < 9 else [values[0], values[-1]])))
    return Picture(name, title, _said(title, said), _finished(chart, height=250), told)


def _throughput(cells: Sequence[Cell], unit: str) -> Picture | None:
    """Curves over the number of ranks, or over the first number that varies; bars where none does."""
    metric, name = f"throughput/{unit}_per_s", f"throughput-{unit}"
    shown = having(cells, metric)
    scale = scale_of(metric, [cell.value(metric) for cell in shown])
    names = varying(cell.first.settings for cell in shown)
    numbers = [one for one in DIMENSIONS if one in names and OPTIONS[one].minimum is not None]
    worlds = [one for one in numbers if one in ("nodes", "nproc_per_node")]
    axis = worlds or numbers[:1]
    others = [one for one in names if one not in axis]
    points: dict[str, tuple[str, list[tuple[float, float]]]] = {}
    for cell in shown if axis else ():
        label = f"{cell.run}: " if len({one.run for one in shown}) > 1 else ""
        label += " · ".join(label_of(cell.first.settings, others))
        at = float(cell.first.settings.world if worlds else cell.settings[axis[0]])
        value = (cell.value(metric) or 0.0) * scale.factor
        points.setdefault(label, (cell.role, []))[1].append((at, value))
    curves = [Curve(label, role, sorted(found)) for label, (role, found) in points.items()]
    if any(len({x for x, _ in curve.points}) > 1 for curve in curves):
        across = "ranks" if worlds else title_of(axis[0])
        if worlds:
            xs = sorted({x for curve in curves for x, _ in curve.points})
            best = max(curve.points[0][1] / curve.points[0][0] for curve in curves)
            curves.append(Curve("in proportion", "muted", [(x, best * x) for x in xs]))
        title = f"Throughput by {across.split(',')[0]}, {scale.unit}"
        return _curved(name, title, curves, across, scale.unit, marked=True, told=bool(worlds))
    return _ranked(cells, metric, "throughput", name)


def _ranked(cells: Sequence[Cell], metric: str, called: str, name: str) -> Picture | None:
    """A bar a cell of one metric, with the difference from its baseline."""
    if not having(cells, metric):
        return None
    scale = scale_of(metric, [cell.value(metric) for cell in cells])
    rows = []
    for cell in cells:
        if (measured := cell.measure(metric)) is None:
            if cell.status != "unsupported":
                rows.append(Row(cell.label, cell.status if cell.status != "ok" else "not measured"))
            continue
        text = scale.text(measured.value)
        if (change := difference(cell, cell.baseline, metric)) is not None:
            said = {"within noise": "≈ {}", "noise unknown": "{} ?"} if change.relative else {}
            text += f" ({said.get(change.verdict, '{}').format(percent(change))})"
        part = (called, max(measured.value, 0.0) * scale.factor, cell.role)
        rows.append(Row(cell.label, text, [part], (measured.error or 0.0) * scale.factor))
    return draw_bars(name, f"{called[0].upper()}{called[1:]}, {scale.unit}", rows, scale)


def _steps(cells: Sequence[Cell]) -> Picture | None:
    """A box a cell: the middle half of its steps, whiskers, and the steps beyond."""
    scale = scale_of("step/p50_ms", [cell.value("step/p50_ms") for cell in cells])
    data, said = list[Plot](), list[tuple[str, str]]()
    for cell in cells:
        of_ranks = ([rank.step_ms for rank in record.ranks] for record in cell.measured_records)
        if times := [ms * scale.factor for ranks in of_ranks for ms in slowest(ranks)]:
            said.append((cell.label, scale.text(cell.value("step/p50_ms"))))
            own: Plot = {"cell": "\n".join(said[-1]), "colour": colour(cell.role)}
            data += [own | {"ms": float(f"{ms:.5g}")} for ms in times[:: math.ceil(len(times) / DOTS)]]
    if not data:
        return None
    values = [row["ms"] for row in data]
    least, most = min(values), quantile(values, 0.9)
    x = alt.Scale(domain=[least, max(least + 2 * (most - least), least * 1.01)], zero=False, nice=True)
    y, room = _rows(["\n".join(one) for one in said])
    chart = (
        data_of(data)
        .mark_boxplot(
            size=14,
            clip=True,
            outliers={"size": 10, "opacity": 0.5},
            median={"color": colour("text")},
            rule={"color": colour("muted")},
        )
        .encode(x=alt.X("ms:Q", scale=x, axis=alt.Axis(title=scale.unit, tickCount=4)), y=y, color=_OWN)
    )
    beyond = sum(value > x.domain[1] for value in values)
    label = _said(f"Step p50, {scale.unit}", said)
    return Picture("steps", f"Step time, {scale.unit}", label, _finished(chart, **room), beyond)


def _communication(cells: Sequence[Cell]) -> Picture | None:
    name = "comm/cost_ms"
    if not (shown := having(cells, name, "step/p50_ms")):
        return None
    scale = scale_of("step/p50_ms", [cell.value("step/p50_ms") for cell in shown])
    rows = []
    for cell in shown:
        step, cost = cell.value("step/p50_ms") or 0.0, cell.value(name) or 0.0
        measured = cell.measure(name)
        if measured is None or within_noise(name, measured):
            cost, text = 0.0, f"{scale.text(step)}, within noise"
        else:
            text = f"{scale.text(step - cost)} + {scale.text(cost)}, {cost / step * 100:.0f} % of the step"
        values = zip(_COMMUNICATION, (max(step - cost, 0.0), cost), strict=True)
        parts = [(part, value * scale.factor, part) for part, value in values]
        rows.append(
            Row(cell.label, text, parts, ((measured.error if measured else None) or 0.0) * scale.factor)
        )
    title = f"What communication costs, {scale.unit} a step"
    return draw_bars("communication", title, rows, scale, _COMMUNICATION)


def _state(cells: Sequence[Cell]) -> Picture | None:
    if not (shown := having(cells, "memory/state_mib")):
        return None
    scale = scale_of("memory/state_mib", [cell.value("memory/state_mib") for cell in shown])
    rows = []
    for cell in shown:
        total, formula = cell.value("memory/state_mib") or 0.0, cell.value("memory/state_predicted_mib")
        by_rank = [rank.memory_bytes for rank in cell.first.ranks if rank.memory_bytes is not None]
        most = max(by_rank, key=lambda one: one.get("total", 0))
        *kinds, rest = _STATE
        sizes = {kind: most.get(kind, 0) / MIB for kind in kinds}
        sizes[rest] = total - sum(sizes.values())
        parts = [(kind, size * scale.factor, kind) for kind, size in sizes.items() if size > 0]
        text, mark = scale.text(total), None
        if formula is not None:
            text += ", as planned" if formula == total else f", planned {scale.text(formula)}"
            mark = formula * scale.factor
        if elsewhere := cell.value("memory/elsewhere_mib"):
            text += f" + {scale.text(elsewhere)} away"
        rows.append(Row(cell.label, text, parts, mark=mark))
    return draw_bars("state", f"Model state and its formula, {scale.unit} a rank", rows, scale, _STATE)


def _loss(cells: Sequence[Cell]) -> Picture | None:
    curves = []
    for cell in cells:
        points = [(float(step), value) for step, value in enumerate(cell.first.loss) if value is not None]
        if cell.status == "ok" and len(points) > 1:
            curves.append(Curve(cell.label, cell.role, points))
    if not curves:
        return None
    at: dict[float, list[float]] = {}
    for x, y in (point for curve in curves for point in curve.points):
        at.setdefault(x, []).append(y)
    apart = max((max(ys) - min(ys) for ys in at.values() if len(ys) == len(curves)), default=None)
    return _curved(
        "loss", "Loss", curves, "step", "loss", marked=False, told=apart if len(curves) > 1 else None
    )
