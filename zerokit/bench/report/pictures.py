"""The pictures of cells: which there are, what they show, and what is said beneath them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerokit.bench.comparison.cells import Cell, name_of, varying
from zerokit.bench.comparison.differences import difference
from zerokit.bench.comparison.figures import Scale, percent, within_noise
from zerokit.bench.comparison.headlines import pareto
from zerokit.bench.comparison.roles import memory_metric, roles_of
from zerokit.bench.record.metrics import METRICS, MIB, UNITS
from zerokit.bench.record.statistics import slowest
from zerokit.bench.report import plots
from zerokit.bench.report.plots import Plot, Row, Series

# Settings that are numbers with an order, and so an axis when they vary.
_ORDERED = {
    "batch_size": "samples a rank and micro-batch",
    "seq_len": "tokens a sequence",
    "accumulate": "micro-batches a step",
    "bucket_mb": "bucket, MiB",
}
_WORLD = ("nodes", "nproc_per_node")
_PHASES = {"forward": "first", "backward": "third", "optimizer": "second"}
_EXPOSED = "exposed communication"
_STATE = {"parameters": "first", "gradients": "third", "optimizer": "second", "buffers and buckets": "soft"}

Partners = Mapping[int, Cell | None]
Roles = Mapping[int, str]


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

    @property
    def instrumented(self) -> bool:
        """Whether it shows extra steps that were looked into, and not the measured ones."""
        return self.kind in ("phases", "in a step")


def make_pictures(cells: Sequence[Cell], partners: Partners) -> list[Picture]:
    """All pictures that these cells have figures for. One cell alone is compared with nothing."""
    roles = roles_of(cells)
    found: list[Picture | None] = []
    if len(cells) > 1:
        ranked = [(f"throughput/{unit}_per_s", "throughput", f"throughput-{unit}") for unit in UNITS]
        metric, called = memory_metric(cells)
        for one in (*ranked, (metric, f"{called} a rank", "memory")):
            found.append(_ranked(cells, roles, partners, *one))
        found += [_front(cells, roles, unit) for unit in UNITS]
        found += [picture for unit in UNITS for picture in _over(cells, roles, unit)]
    found += [_steps(cells, roles), _communication(cells, roles), _phases(cells), _state(cells)]
    found += [_in_a_step(cells), _memory(cells, roles), _loss(cells, roles)]
    return [picture for picture in found if picture is not None]


def having(cells: Sequence[Cell], *names: str) -> list[Cell]:
    """The cells that have all of these figures."""
    return [cell for cell in cells if all(cell.value(name) is not None for name in names)]


def _values(cell: Cell, *names: str) -> list[float]:
    """Figures that the cell has."""
    return [cell.value(name) or 0.0 for name in names]


def _say(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """What the rows of a picture say, as a sentence."""
    return f"{title}: {'; '.join(f'{label} {said}' for label, said in rows)}"


def _barred(
    kind: str,
    title: str,
    rows: Sequence[Row],
    scale: Scale,
    legend: Mapping[str, str] | None = None,
    told: Any = None,
) -> Picture:
    label = _say(title, ((row.label, row.text + (f" ({row.extra})" if row.extra else "")) for row in rows))
    return Picture(kind, kind, title, label, plots.bars(rows, scale.unit, legend), told)


def _curved(
    kind: str, name: str, title: str, rows: Sequence[Series], plot: Plot, told: Any = None
) -> Picture:
    said = []
    for row in rows:
        values = [f"{y:,.4g} at {x:,.4g}" for x, y in row.points]
        said.append((row.label, ", ".join(values if len(values) < 9 else [values[0], values[-1]])))
    return Picture(kind, name, title, _say(title, said), plot, told)


def _ranked(
    cells: Sequence[Cell], roles: Roles, partners: Partners, metric: str, called: str, name: str
) -> Picture | None:
    """A bar a cell of one metric, with the difference from its baseline."""
    if not having(cells, metric):
        return None
    scale = Scale.of(METRICS[metric].unit, [cell.value(metric) for cell in cells])
    rows = []
    for cell in cells:
        if (measured := cell.measure(metric)) is None:
            if cell.status != "unsupported":
                rows.append(Row(cell.label, (), cell.status if cell.status != "ok" else "not measured"))
            continue
        extra, role = "", "muted"
        if (change := difference(cell, partners[id(cell)], metric)) is not None:
            said = {"within noise": "≈ {}", "noise unknown": "{} ?"} if change.relative else {}
            extra = said.get(change.verdict, "{}").format(percent(change))
            role = change.verdict if change.verdict in ("better", "worse") else role
        part = (called, max(measured.value, 0.0) * scale.factor, roles[id(cell)])
        error = (measured.error or 0.0) * scale.factor
        rows.append(Row(cell.label, [part], scale.text(measured.value), extra, role, error))
    picture = _barred("ranked", f"{called[0].upper()}{called[1:]}, {scale.unit}", rows, scale, told=metric)
    return replace(picture, name=name)


def _front(cells: Sequence[Cell], roles: Roles, unit: str) -> Picture | None:
    speed, (memory, called) = f"throughput/{unit}_per_s", memory_metric(cells)
    shown = having(cells, memory, speed)
    if len(shown) < 2:
        return None
    lean = Scale.of("MiB", [cell.value(memory) for cell in shown])
    fast = Scale.of(f"{unit}/s", [cell.value(speed) for cell in shown])
    at = [(x * lean.factor, y * fast.factor) for x, y in (_values(cell, memory, speed) for cell in shown)]
    points = [
        Series(cell.label, [place], roles[id(cell)], marked=front)
        for cell, place, front in zip(shown, at, pareto(at), strict=True)
    ]
    best = [point.label for point in sorted(points, key=lambda point: point.points[0]) if point.marked]
    title, up, across = "Throughput and memory", f"throughput, {fast.unit}", f"{called}, {lean.unit}"
    said = [f"{y:,.4g} {fast.unit}, {x:,.4g} {lean.unit}" for x, y in at]
    label = _say(title, zip([cell.label for cell in shown], said, strict=True))
    plot = plots.scatter(points, across, up)
    return Picture("front", f"throughput-memory-{unit}", title, label, plot, best, up)


def _over(cells: Sequence[Cell], roles: Roles, unit: str) -> list[Picture]:
    """Throughput over what varies: the number of ranks, with the efficiency, and the first setting with an order."""
    metric = f"throughput/{unit}_per_s"
    shown = having(cells, metric)
    scale = Scale.of(f"{unit}/s", [cell.value(metric) for cell in shown])
    names, found = varying(cell.first for cell in shown), []
    if rows := _courses(shown, roles, _WORLD, metric, scale.factor):
        worlds = sorted({world for row in rows for world, _ in row.points})
        best = max(row.points[0][1] / row.points[0][0] for row in rows)
        ideal = Series("in proportion", [(one, best * one) for one in worlds], "muted", "ideal", marked=True)
        plot = plots.curves([*rows, ideal], "ranks", scale.unit, worlds)
        title = f"Throughput by ranks, {scale.unit}"
        found.append(_curved("scaling", f"scaling-{unit}", title, rows, plot))
        shares = [
            replace(row, points=[(x, y / x / row.points[0][1] * row.points[0][0]) for x, y in row.points])
            for row in rows
            if len(row.points) > 1
        ]
        plot = plots.curves(shares, "ranks", "efficiency", worlds, form=".0%")
        title, weak = "Scaling efficiency by ranks", "batch_size" not in names
        found.append(_curved("efficiency", f"efficiency-{unit}", title, shares, plot, weak))
    axis = next((name for name in _ORDERED if name in names), "")
    if axis and (rows := _courses(shown, roles, [axis], metric, scale.factor)):
        ticks = sorted({value for row in rows for value, _ in row.points})
        plot = plots.curves(rows, _ORDERED[axis], scale.unit, ticks)
        title = f"Throughput by {_ORDERED[axis].split(',')[0]}, {scale.unit}"
        found.append(_curved("over", f"throughput-{unit}-by-{axis}", title, rows, plot))
    return found


def _courses(
    cells: Sequence[Cell], roles: Roles, axis: Sequence[str], metric: str, factor: float
) -> list[Series]:
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
    return [Series(label, sorted(points), role, label) for label, (role, points) in found.items()]


def _steps(cells: Sequence[Cell], roles: Roles) -> Picture | None:
    scale = Scale.of("ms", [cell.value("step/p50_ms") for cell in cells])
    rows, middles, many = [], [], False
    for cell in cells:
        of_ranks = ([rank.step_ms for rank in record.ranks] for record in cell.measured_records)
        if times := [ms for ranks in of_ranks for ms in slowest(ranks)]:
            many |= len(times) > plots.DOTS
            points = [(float(step), float(f"{ms * scale.factor:.5g}")) for step, ms in enumerate(times)]
            rows.append(Series(cell.label, points, roles[id(cell)], scale.text(cell.value("step/p50_ms"))))
            middles.append((cell.value("step/p50_ms") or 0.0) * scale.factor)
    if not rows:
        return None
    label = _say(f"Step p50, {scale.unit}", ((row.label, row.name) for row in rows))
    return Picture(
        "steps", "steps", f"Step time, {scale.unit}", label, plots.strips(rows, middles, scale.unit), many
    )


def _communication(cells: Sequence[Cell], roles: Roles) -> Picture | None:
    name = "comm/cost_ms"
    if not (shown := having(cells, name, "step/p50_ms")):
        return None
    scale = Scale.of("ms", [cell.value("step/p50_ms") for cell in shown])
    rows = []
    for cell in shown:
        (step, cost), measured = _values(cell, "step/p50_ms", name), cell.measure(name)
        text, extra = scale.text(step), "within noise"
        if measured is None or within_noise(name, measured):
            cost = 0.0
        else:
            text, extra = f"{scale.text(step - cost)} + {scale.text(cost)}", f"{cost / step:.0%} of the step"
        error = ((measured.error if measured else None) or 0.0) * scale.factor
        own = ("communication", cost * scale.factor, roles[id(cell)])
        parts = [("all else", max(step - cost, 0.0) * scale.factor, "soft"), own]
        rows.append(Row(cell.label, parts, text, extra.replace("%", " %"), error=error))
    return _barred("communication", f"What communication costs, {scale.unit} a step", rows, scale)


def _phases(cells: Sequence[Cell]) -> Picture | None:
    names = [f"phase/{name}_ms" for name in _PHASES]
    if not (shown := having(cells, names[0])):
        return None
    scale = Scale.of("ms", [sum(_values(cell, *names)) for cell in shown])
    rows = []
    for cell in shown:
        values, waits = _values(cell, *names), cell.value("comm/exposed_ms")
        parts = [
            (name, max(value, 0.0) * scale.factor, _PHASES[name])
            for name, value in zip(_PHASES, values, strict=True)
        ]
        under = None if waits is None else (_EXPOSED, max(waits, 0.0) * scale.factor, "text")
        rows.append(Row(cell.label, parts, " + ".join(map(scale.text, values)), under=under))
    exposes = any(row.under for row in rows)
    legend = _PHASES | ({_EXPOSED: "text"} if exposes else {})
    return _barred("phases", f"Forward, backward and optimizer, {scale.unit}", rows, scale, legend, exposes)


def _state(cells: Sequence[Cell]) -> Picture | None:
    if not (shown := having(cells, "memory/state_mib")):
        return None
    scale = Scale.of("MiB", [cell.value("memory/state_mib") for cell in shown])
    rows = []
    for cell in shown:
        total, formula = cell.value("memory/state_mib") or 0.0, cell.value("memory/state_predicted_mib")
        by_rank = [rank.memory_bytes for rank in cell.first.ranks if rank.memory_bytes is not None]
        most = max(by_rank, key=lambda one: one.get("total", 0))
        *kinds, rest = _STATE
        sizes = {name: most.get(name, 0) / MIB for name in kinds}
        sizes[rest] = total - sum(sizes.values())
        parts = [(name, size * scale.factor, _STATE[name]) for name, size in sizes.items() if size > 0]
        extra, mark = "", None
        if formula is not None:
            extra = "as planned" if formula == total else f"planned {scale.text(formula)}"
            mark = formula * scale.factor
        rows.append(Row(cell.label, parts, scale.text(total), extra, mark=mark))
    title = f"Model state beside its formula, {scale.unit} a rank"
    return _barred("state", title, rows, scale, _STATE)


def _in_a_step(cells: Sequence[Cell]) -> Picture | None:
    found = [(cell, cell.first.timeline) for cell in cells if cell.status == "ok"]
    shown = [(cell, timeline) for cell, timeline in found if timeline is not None and timeline.seconds]
    if not shown:
        return None
    kinds = _STATE | {"activations": "fourth"}
    wholes = [[sum(sizes) for sizes in zip(*one.bytes.values(), strict=True)] for _, one in shown]
    scale = Scale.of("MiB", [max(whole) / MIB for whole in wholes])
    rows = []
    for (cell, timeline), whole in zip(shown, wholes, strict=True):
        amounts = zip(
            *([size / MIB * scale.factor for size in timeline.bytes[kind]] for kind in kinds), strict=True
        )
        end = timeline.seconds[-1] or 1.0
        points = [(at / end, sizes) for at, sizes in zip(timeline.seconds, amounts, strict=True)]
        borders = [at / end for part in ("backward", "optimizer") for at in timeline.parts.get(part, ())]
        most = timeline.bytes["activations"][whole.index(max(whole))] / MIB
        text = f"peak {scale.text(max(whole) / MIB)}, activations {scale.text(most)} of it"
        rows.append(plots.Band(cell.label, points, text, borders))
    title = f"Memory in the course of a step, {scale.unit} on rank 0"
    label = _say(title, ((row.label, row.text) for row in rows))
    plot = plots.bands(rows, "share of the step", kinds)
    return Picture("in a step", "memory-in-a-step", title, label, plot)


def _memory(cells: Sequence[Cell], roles: Roles) -> Picture | None:
    """What the sampler read of memory while the measured steps ran: of devices, where any cell has them."""
    read = {id(cell): _readings(cell) for cell in cells}
    on_device = any(device for found in read.values() for device, _ in found)
    rows = []
    for cell in cells:
        if series := [points for device, points in read[id(cell)] if device == on_device]:
            fullest = max(series, key=lambda points: max(y for _, y in points))
            rows.append(Series(cell.label, fullest, roles[id(cell)], cell.label))
    if not rows:
        return None
    title = f"{'Device' if on_device else 'Main'} memory over time, MiB"
    plot = plots.curves(rows, "seconds since the first measured step", "MiB", from_zero=True)
    return _curved("over time", "memory-over-time", title, rows, plot, on_device)


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


def _loss(cells: Sequence[Cell], roles: Roles) -> Picture | None:
    found = []
    for cell in cells:
        points = [(float(step), value) for step, value in enumerate(cell.first.loss) if value is not None]
        if cell.status == "ok" and len(points) > 1:
            found.append(Series(cell.label, points, roles[id(cell)]))
    if not found:
        return None
    values = [value for row in found for _, value in row.points]
    near = 0.02 * (max(values) - min(values))
    groups: list[list[Series]] = []
    for row in sorted(found, key=lambda row: -len(row.points)):
        group = next((group for group in groups if _apart(group[0], row) <= near), None)
        if group is None:
            groups.append([row])
        else:
            group.append(row)
    rows = []
    for group in groups:  # the longest of those that lie on each other is drawn last, with the name of all
        name = group[0].label if len(group) == 1 else f"{group[0].label} · and {len(group) - 1} alike"
        name = f"all {len(group)}" if len(groups) == 1 < len(group) else name
        rows += [*reversed(group[1:]), replace(group[0], name=name)]
    apart = max(_apart(one, other) for one in rows for other in rows) if len(rows) > 1 else None
    return _curved("loss", "loss", "Loss", rows, plots.curves(rows, "step", "loss"), apart)


def _apart(one: Series, other: Series) -> float:
    """How far two curves are apart at most, where both have values."""
    values = dict(other.points)
    return max((abs(y - values[x]) for x, y in one.points if x in values), default=0.0)
