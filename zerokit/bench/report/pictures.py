"""The pictures of cells: which there are, what they show, and what is said beneath them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerokit.bench.comparison.cells import Cell, name_of, varying
from zerokit.bench.comparison.differences import difference
from zerokit.bench.comparison.figures import Scale, percent
from zerokit.bench.comparison.headlines import pareto
from zerokit.bench.comparison.roles import memory_metric, roles_of
from zerokit.bench.record.metrics import METRICS, MIB, UNITS
from zerokit.bench.record.statistics import quantile, slowest
from zerokit.bench.report import plots
from zerokit.bench.report.plots import Curve, Part, Plot, Point, Row, Strip

# Settings that are numbers with an order, and so an axis when they vary.
_ORDERED = {
    "batch_size": "samples a rank and micro-batch",
    "seq_len": "tokens a sequence",
    "accumulate": "micro-batches a step",
    "bucket_mb": "bucket, MiB",
}
_WORLD = ("nodes", "nproc_per_node")
_PHASES = {"forward": "first", "backward": "third", "optimizer": "second"}
_STATE = {"parameters": "first", "gradients": "third", "optimizer": "second"}

Partners = Mapping[int, Cell | None]


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: its specification without title and width, and `label`, what it says for those who do not see it.

    Its note is the template's, by `kind`; `told` is what that has to say of these cells. `up` names the vertical axis.
    """

    kind: str
    name: str
    title: str
    label: str
    plot: Plot
    told: Any = None
    up: str = ""


def make_pictures(cells: Sequence[Cell], partners: Partners) -> list[Picture]:
    """All pictures that these cells have figures for. One cell alone is compared with nothing."""
    roles = roles_of(cells)
    found: list[Picture | None] = []
    if len(cells) > 1:
        for unit in UNITS:
            found.append(
                _ranked(cells, partners, f"throughput/{unit}_per_s", "throughput", f"throughput-{unit}")
            )
        metric, called = memory_metric(cells)
        found.append(_ranked(cells, partners, metric, f"{called} a rank", "memory"))
        found += [_front(cells, roles, unit) for unit in UNITS]
        for unit in UNITS:
            found += _over(cells, roles, unit)
    found += [_steps(cells, roles), _communication(cells, roles), _phases(cells), _state(cells)]
    found += [_memory(cells, roles), _loss(cells, roles)]
    return [picture for picture in found if picture is not None]


def having(cells: Sequence[Cell], *names: str) -> list[Cell]:
    """The cells that have all of these figures."""
    return [cell for cell in cells if all(cell.value(name) is not None for name in names)]


def _words(title: str, rows: Sequence[Row | Strip | Curve]) -> str:
    """What the rows of a picture say, as a sentence."""
    said = []
    for row in rows:
        if isinstance(row, Curve):
            values = [f"{y:,.4g} at {x:,.4g}" for x, y in row.points]
            said.append(f"{row.label} {', '.join(values if len(values) < 9 else [values[0], values[-1]])}")
        else:
            extra = f" ({row.extra})" if isinstance(row, Row) and row.extra else ""
            said.append(f"{row.label} {row.text}{extra}")
    return f"{title}: {'; '.join(said)}"


def _ranked(cells: Sequence[Cell], partners: Partners, metric: str, called: str, name: str) -> Picture | None:
    """A bar a cell of one metric, with the difference from its baseline."""
    if not having(cells, metric):
        return None
    roles, scale = roles_of(cells), Scale.of(METRICS[metric].unit, [cell.value(metric) for cell in cells])
    rows = []
    for cell in cells:
        measured = cell.measure(metric)
        if measured is None:
            if cell.status != "unsupported":
                rows.append(Row(cell.label, (), cell.status if cell.status != "ok" else "not measured"))
            continue
        extra, role = "", "muted"
        if (change := difference(cell, partners[id(cell)], metric)) is not None:
            same = change.verdict == "within noise" and change.relative
            extra = f"≈ {percent(change)}" if same else percent(change)
            role = change.verdict if change.verdict in ("better", "worse") else role
        error = (measured.error or 0.0) * scale.factor
        part = Part(called, max(measured.value, 0.0) * scale.factor, roles[id(cell)], error or None)
        rows.append(Row(cell.label, (part,), scale.text(measured.value), extra, role, error))
    title = f"{called[0].upper()}{called[1:]}, {scale.unit}"
    return Picture("ranked", name, title, _words(title, rows), plots.bars(rows, scale.unit), metric)


def _front(cells: Sequence[Cell], roles: Mapping[int, str], unit: str) -> Picture | None:
    speed, (memory, called) = f"throughput/{unit}_per_s", memory_metric(cells)
    shown = having(cells, speed, memory)
    if len(shown) < 2:
        return None
    lean = Scale.of("MiB", [cell.value(memory) for cell in shown])
    fast = Scale.of(f"{unit}/s", [cell.value(speed) for cell in shown])
    places = [
        ((cell.value(memory) or 0.0) * lean.factor, (cell.value(speed) or 0.0) * fast.factor)
        for cell in shown
    ]
    points = [
        Point(x, y, cell.label, roles[id(cell)], front)
        for cell, (x, y), front in zip(shown, places, pareto(places), strict=True)
    ]
    best = [point.label for point in sorted(points, key=lambda point: point.x) if point.front]
    title, up, across = "Throughput and memory", f"throughput, {fast.unit}", f"{called}, {lean.unit}"
    label = "; ".join(f"{one.label} {one.y:,.4g} {fast.unit}, {one.x:,.4g} {lean.unit}" for one in points)
    plot = plots.scatter(points, across, up)
    return Picture("front", f"throughput-memory-{unit}", title, f"{title}: {label}", plot, best, up)


def _over(cells: Sequence[Cell], roles: Mapping[int, str], unit: str) -> list[Picture]:
    """Throughput over what varies: the number of ranks, with the efficiency, and the first setting with an order."""
    metric = f"throughput/{unit}_per_s"
    shown = having(cells, metric)
    scale = Scale.of(f"{unit}/s", [cell.value(metric) for cell in shown])
    names, found = varying(cell.first for cell in shown), []
    if rows := _curves(shown, roles, _WORLD, metric, scale.factor):
        worlds = sorted({world for row in rows for world, _ in row.points})
        best = max(row.points[0][1] / row.points[0][0] for row in rows)
        ideal = Curve("in proportion", [(one, best * one) for one in worlds], "muted", "ideal", dashed=True)
        title = f"Throughput by ranks, {scale.unit}"
        plot = plots.curves([*rows, ideal], "ranks", scale.unit, worlds)
        found.append(Picture("scaling", f"scaling-{unit}", title, _words(title, rows), plot))
        shares = [
            replace(row, points=[(x, y / x / row.points[0][1] * row.points[0][0]) for x, y in row.points])
            for row in rows
            if len(row.points) > 1
        ]
        title = "Scaling efficiency by ranks"
        plot = plots.curves(shares, "ranks", "efficiency", worlds, form=".0%")
        found.append(
            Picture(
                "efficiency",
                f"efficiency-{unit}",
                title,
                _words(title, shares),
                plot,
                "batch_size" not in names,
            )
        )
    axis = next((name for name in _ORDERED if name in names), "")
    if axis and (rows := _curves(shown, roles, [axis], metric, scale.factor)):
        title = f"Throughput by {_ORDERED[axis].split(',')[0]}, {scale.unit}"
        ticks = sorted({value for row in rows for value, _ in row.points})
        plot = plots.curves(rows, _ORDERED[axis], scale.unit, ticks)
        found.append(Picture("over", f"throughput-{unit}-by-{axis}", title, _words(title, rows), plot))
    return found


def _curves(
    cells: Sequence[Cell], roles: Mapping[int, str], axis: Sequence[str], metric: str, factor: float
) -> list[Curve]:
    """A metric over the product of these settings, a curve for each of what else varies; none for one value."""
    others = [name for name in varying(cell.first for cell in cells) if name not in axis]
    several = len({cell.run for cell in cells}) > 1
    found: dict[str, tuple[str, list[tuple[float, float]]]] = {}
    for cell in cells:
        if None not in (values := [cell.settings[name] for name in axis]):
            label = (f"{cell.run}: " if several else "") + name_of(cell.first, others)
            points = found.setdefault(label, (roles[id(cell)], []))[1]
            points.append((math.prod(map(float, values)), (cell.value(metric) or 0.0) * factor))
    if all(len({value for value, _ in points}) < 2 for _, points in found.values()):
        return []
    return [Curve(label, sorted(points), role, label) for label, (role, points) in found.items()]


def _steps(cells: Sequence[Cell], roles: Mapping[int, str]) -> Picture | None:
    scale = Scale.of("ms", [cell.value("step/p50_ms") for cell in cells])
    rows = []
    for cell in cells:
        of_ranks = ([rank.step_ms for rank in record.ranks] for record in cell.measured_records)
        if times := [ms * scale.factor for ranks in of_ranks for ms in slowest(ranks)]:
            text = scale.text(quantile(times, 0.5) / scale.factor)
            rows.append(Strip(cell.label, times, roles[id(cell)], text))
    if not rows:
        return None
    label, many = (
        _words(f"Median step, {scale.unit}", rows),
        any(len(row.values) > plots.DOTS for row in rows),
    )
    return Picture("steps", "steps", f"Step time, {scale.unit}", label, plots.strips(rows, scale.unit), many)


def _communication(cells: Sequence[Cell], roles: Mapping[int, str]) -> Picture | None:
    shown = having(cells, "comm/cost_ms", "step/p50_ms")
    if not shown:
        return None
    scale = Scale.of("ms", [cell.value("step/p50_ms") for cell in shown])
    rows = []
    for cell in shown:
        step, cost = (cell.value(name) or 0.0 for name in ("step/p50_ms", "comm/cost_ms"))
        rest = step - min(max(cost, 0.0), step)
        measured = cell.measure("comm/cost_ms")
        error = (measured.error if measured is not None else None) or 0.0
        text, extra = scale.text(step), "faster than its twin" if -cost > error else "within the noise"
        if cost > error and step > 0:
            text = f"{scale.text(rest)} + {scale.text(cost)}"
            extra = f"{cost / step:.0%} of the step".replace("%", " %")
        parts = [
            Part("all else", rest * scale.factor, "soft"),
            Part("communication", max(cost, 0.0) * scale.factor, roles[id(cell)], error * scale.factor),
        ]
        rows.append(Row(cell.label, parts, text, extra, error=error * scale.factor))
    title = f"What communication costs, {scale.unit} a step"
    return Picture("communication", "communication", title, _words(title, rows), plots.bars(rows, scale.unit))


def _phases(cells: Sequence[Cell]) -> Picture | None:
    shown = having(cells, "phase/forward_ms")
    if not shown:
        return None
    values = [{name: max(cell.value(f"phase/{name}_ms") or 0.0, 0.0) for name in _PHASES} for cell in shown]
    scale = Scale.of("ms", [sum(one.values()) for one in values])
    rows = []
    for cell, one in zip(shown, values, strict=True):
        parts = [Part(name, value * scale.factor, _PHASES[name]) for name, value in one.items()]
        waits, under = cell.value("comm/exposed_ms"), None
        if waits is not None:
            under = Part("exposed communication", max(waits, 0.0) * scale.factor, "text")
        rows.append(Row(cell.label, parts, " + ".join(map(scale.text, one.values())), under=under))
    exposes = any(row.under for row in rows)
    legend = _PHASES | ({"exposed communication": "text"} if exposes else {})
    title, label = f"Phases of a step, {scale.unit}", _words("Forward, backward, optimizer", rows)
    return Picture("phases", "phases", title, label, plots.bars(rows, scale.unit, legend), exposes)


def _state(cells: Sequence[Cell]) -> Picture | None:
    shown = having(cells, "memory/state_mib")
    if not shown:
        return None
    scale = Scale.of("MiB", [cell.value("memory/state_mib") for cell in shown])
    rows, legend = [], _STATE | {"buffers and buckets": "soft"}
    for cell in shown:
        total, formula = cell.value("memory/state_mib") or 0.0, cell.value("memory/state_predicted_mib")
        by_rank = [rank.memory_bytes for rank in cell.first.ranks if rank.memory_bytes is not None]
        most = max(by_rank, key=lambda one: one.get("total", 0))
        kinds = {name: most.get(name, 0) / MIB for name in _STATE}
        kinds["buffers and buckets"] = max(total - sum(kinds.values()), 0.0)
        parts = [Part(name, value * scale.factor, legend[name]) for name, value in kinds.items() if value > 0]
        extra, mark = "", None
        if formula is not None:
            extra = "as planned" if formula == total else f"planned {scale.text(formula)}"
            mark = formula * scale.factor
        rows.append(Row(cell.label, parts, scale.text(total), extra, mark=mark))
    title = f"Model state beside its formula, {scale.unit} a rank"
    return Picture("state", "state", title, _words(title, rows), plots.bars(rows, scale.unit, legend))


def _memory(cells: Sequence[Cell], roles: Mapping[int, str]) -> Picture | None:
    """What the sampler read of memory while the measured steps ran: of devices, where any cell has them."""
    read = {id(cell): _readings(cell) for cell in cells}
    on_device = any(device for found in read.values() for device, _ in found)
    rows = []
    for cell in cells:
        if series := [points for device, points in read[id(cell)] if device == on_device]:
            fullest = max(series, key=lambda points: max(y for _, y in points))
            rows.append(Curve(cell.label, plots.thinned(fullest), roles[id(cell)], cell.label))
    if not rows:
        return None
    title = f"{'Device' if on_device else 'Main'} memory over time, MiB"
    plot = plots.curves(rows, "seconds since the first measured step", "MiB")
    return Picture("over time", "memory-over-time", title, _words(title, rows), plot, on_device)


def _readings(cell: Cell) -> list[tuple[bool, list[tuple[float, float]]]]:
    """Series of seconds and MiB, and whether each is of a device; none of fewer than three readings."""
    found = []
    for samples in cell.first.system if cell.status == "ok" else ():
        for name, values in samples.series.items():
            device = name.startswith("gpu_")
            if name.endswith("memory_usage_megabytes") and (device or name.startswith("system_")):
                read = zip(samples.seconds, values, strict=False)
                points = [(round(x, 2), round(y * 1e6 / MIB, 1)) for x, y in read if y is not None]
                found += [(device, points)] if len(points) > 2 else []
    return found


def _loss(cells: Sequence[Cell], roles: Mapping[int, str]) -> Picture | None:
    found = {}
    for cell in cells:
        points = [(float(step), value) for step, value in enumerate(cell.first.loss) if value is not None]
        if cell.status == "ok" and len(points) > 1:
            found[id(cell)] = Curve(cell.label, points, roles[id(cell)])
    if not found:
        return None
    values = [value for row in found.values() for _, value in row.points]
    near = 0.02 * (max(values) - min(values))
    groups: list[list[Curve]] = []
    for row in sorted(found.values(), key=lambda row: -len(row.points)):
        alike = (group for group in groups if _apart(group[0], row) <= near)
        if (group := next(alike, None)) is not None:
            group.append(row)
        else:
            groups.append([row])
    rows = []
    for group in groups:  # the longest of those that lie on each other is drawn last, with the name of all
        name = group[0].label if len(group) == 1 else f"{group[0].label} · and {len(group) - 1} alike"
        name = f"all {len(group)}" if len(groups) == 1 < len(group) else name
        rows += [*reversed(group[1:]), replace(group[0], name=name)]
    apart = max(_apart(one, other) for one in rows for other in rows)
    label = _words("Loss, first and last", rows)
    rows = [replace(row, points=plots.thinned(row.points)) for row in rows]
    return Picture(
        "loss", "loss", "Loss", label, plots.curves(rows, "step", "loss"), apart if len(rows) > 1 else None
    )


def _apart(one: Curve, other: Curve) -> float:
    """How far two curves are apart at most, where both have values."""
    values = dict(other.points)
    return max((abs(y - values[x]) for x, y in one.points if x in values), default=0.0)
