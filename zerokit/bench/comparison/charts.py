"""The pictures of a comparison: which there are, what they show, and what is said beneath them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerokit.bench.comparison.cells import Cell, name_of, varying
from zerokit.bench.comparison.differences import difference
from zerokit.bench.comparison.drawing import COLOURS, Drawing
from zerokit.bench.comparison.figures import Scale, percent
from zerokit.bench.comparison.plots import Part, Point, Row, Series, Strip, bars, lines, scatter, strips
from zerokit.bench.record.metrics import MIB, UNITS
from zerokit.bench.record.statistics import quantile, slowest

# Dots of a strip: more than these cannot be told apart, and make a page heavy.
DOTS = 300
# Curves of which each is named; of more, only the highest and the lowest.
_NAMED = 10
_RUNS = ("first", "second", "third", "fourth")
# Settings that are numbers with an order, and so an axis when they vary.
_ORDERED = {
    "batch_size": "samples a rank and micro-batch",
    "seq_len": "tokens a sequence",
    "accumulate": "micro-batches a step",
    "bucket_mb": "bucket, MiB",
    "nodes": "nodes",
    "nproc_per_node": "ranks a node",
}
_PHASES = (("forward", "first"), ("backward", "third"), ("optimizer", "second"))
_KINDS = (("parameters", "first"), ("gradients", "third"), ("optimizer", "second"))


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture.

    Attributes:
        name: for a file.
        title: what it shows, with its unit.
        note: how to read it, and what it does not show.
        label: what it says, for those who do not see it.
        draw: makes it for a width in pixels.
        legend: role and name of colours that no label in the picture explains.
    """

    name: str
    title: str
    note: str
    label: str
    draw: Callable[[float], Drawing]
    legend: tuple[tuple[str, str], ...] = ()


def make_charts(cells: Sequence[Cell], partners: Mapping[int, Cell | None]) -> list[Chart]:
    """All pictures that these cells have figures for. One cell alone is compared with nothing."""
    roles = roles_of(cells)
    found: list[Chart | None] = []
    if len(cells) > 1:
        found += [_throughput(cells, partners, roles, unit) for unit in UNITS]
        found.append(_peak(cells, partners, roles))
        found += [_front(cells, roles, unit) for unit in UNITS]
        found += [_over(cells, roles, unit) for unit in UNITS]
    found += [
        _steps(cells, roles),
        _communication(cells, roles),
        _phases(cells),
        _state(cells),
        _loss(cells, roles),
    ]
    return [chart for chart in found if chart is not None]


def roles_of(cells: Sequence[Cell]) -> dict[int, str]:
    """A colour a cell: its engine's, or its run's where the engine is the same everywhere. By `id(cell)`."""
    runs = list(dict.fromkeys(cell.run for cell in cells))
    engines = {cell.first.settings.engine for cell in cells}
    if len(engines) == 1 and len(runs) > 1:
        return {id(cell): _RUNS[runs.index(cell.run) % len(_RUNS)] for cell in cells}
    return {
        id(cell): engine if (engine := cell.first.settings.engine) in COLOURS else "compute-only"
        for cell in cells
    }


def memory_metric(cells: Sequence[Cell]) -> tuple[str, str]:
    """The name of the metric that limits a model's size here, and what it is called."""
    if any(cell.value("memory/peak_allocated_mib") is not None for cell in cells):
        return "memory/peak_allocated_mib", "peak CUDA memory"
    return "memory/peak_host_mib", "peak host memory"


def _bar_chart(
    cells: Sequence[Cell], partners: Mapping[int, Cell | None], roles: Mapping[int, str], name: str, unit: str
) -> tuple[Callable[[float], Drawing], Scale, str]:
    """Bars of one metric, with the difference from each baseline, and the scale and the words that go with them."""
    scale = Scale.of(unit, [cell.value(name) for cell in cells])
    rows = []
    for cell in cells:
        measured = cell.measure(name)
        if measured is None:
            rows.append(Row(cell.label, (), cell.status if cell.status != "ok" else "not measured"))
            continue
        text, extra, role = scale.text(measured.value), "", "muted"
        if (change := difference(cell, partners[id(cell)], name)) is not None:
            extra = percent(change)
            if (verdict := change.verdict) == "within noise":
                extra = f"≈ {extra}" if change.relative else extra
            elif verdict in ("better", "worse"):
                role = verdict
        part = Part(max(measured.value, 0.0), roles[id(cell)], title=f"{cell.label}: {text} {scale.unit}")
        rows.append(Row(cell.label, (part,), text, extra, role, measured.error or 0.0))
    words = "; ".join(f"{row.label} {row.text}{f' ({row.extra})' if row.extra else ''}" for row in rows)
    return lambda width: bars(rows, width), scale, words


def _throughput(
    cells: Sequence[Cell], partners: Mapping[int, Cell | None], roles: Mapping[int, str], unit: str
) -> Chart | None:
    name = f"throughput/{unit}_per_s"
    if not any(cell.value(name) is not None for cell in cells):
        return None
    shown = [
        cell for cell in cells if cell.value(name) is not None or cell.status not in ("ok", "unsupported")
    ]
    draw, scale, words = _bar_chart(shown, partners, roles, name, f"{unit}/s")
    note = f"At the median step, all ranks together. More is better. {_differences(shown, partners)}"
    title = f"Throughput, {scale.unit}"
    return Chart(f"throughput-{unit}", title, note, f"{title}: {words}", draw)


def _peak(
    cells: Sequence[Cell], partners: Mapping[int, Cell | None], roles: Mapping[int, str]
) -> Chart | None:
    name, words_for = memory_metric(cells)
    shown = [
        cell for cell in cells if cell.value(name) is not None or cell.status not in ("ok", "unsupported")
    ]
    if not any(cell.value(name) is not None for cell in cells):
        return None
    draw, scale, words = _bar_chart(shown, partners, roles, name, "MiB")
    note = "Of the rank that takes most, construction included. Less is better."
    if name == "memory/peak_host_mib":
        note += " Resident memory of the whole process: Python and torch are in it."
    title = f"{words_for.capitalize().replace('cuda', 'CUDA')} a rank, {scale.unit}"
    return Chart("memory", title, note, f"{title}: {words}", draw)


def _differences(cells: Sequence[Cell], partners: Mapping[int, Cell | None]) -> str:
    baselines = {id(partner): partner for cell in cells if (partner := partners[id(cell)]) is not None}
    if not baselines:
        return ""
    against = next(iter(baselines.values())).label if len(baselines) == 1 else "each one's baseline"
    return f"Percentages are against {against}; ≈ is within the noise."


def _front(cells: Sequence[Cell], roles: Mapping[int, str], unit: str) -> Chart | None:
    speed, (memory, memory_words) = f"throughput/{unit}_per_s", memory_metric(cells)
    shown = [cell for cell in cells if cell.value(speed) is not None and cell.value(memory) is not None]
    if len(shown) < 2:
        return None
    front = pareto([(cell.value(memory) or 0.0, cell.value(speed) or 0.0) for cell in shown])
    fast, lean = (
        Scale.of(one, [cell.value(name) for cell in shown])
        for one, name in ((f"{unit}/s", speed), ("MiB", memory))
    )
    points = [
        Point(
            (cell.value(memory) or 0.0) * lean.factor,
            (cell.value(speed) or 0.0) * fast.factor,
            cell.label,
            roles[id(cell)],
            on_front,
            f"{cell.label}: {fast.text(cell.value(speed))} {fast.unit}, {lean.text(cell.value(memory))} {lean.unit}",
        )
        for cell, on_front in zip(shown, front, strict=True)
    ]
    best = [point.label for point in points if point.front]
    note = "Up and to the left is better. Filled: nothing else here is both faster and smaller"
    note += f" ({', '.join(best)})." if len(best) <= 6 else "."
    label = "Throughput over memory: " + "; ".join(point.title for point in points)
    return Chart(
        f"throughput-memory-{unit}",
        "Throughput and memory",
        note,
        label,
        lambda width: scatter(points, width, f"{memory_words}, {lean.unit}", f"throughput, {fast.unit}"),
    )


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which (cost, gain) no other beats: none has less cost at no less gain, or more gain at no more cost."""
    return [
        not any(
            (other[0] <= cost and other[1] > gain) or (other[0] < cost and other[1] >= gain)
            for other in points
        )
        for cost, gain in points
    ]


def _over(cells: Sequence[Cell], roles: Mapping[int, str], unit: str) -> Chart | None:
    """Throughput over the first setting with an order that varies."""
    metric = f"throughput/{unit}_per_s"
    shown = [cell for cell in cells if cell.value(metric) is not None]
    names = varying(cell.first for cell in shown)
    axis = next((name for name in _ORDERED if name in names), None)
    if axis is None:
        return None
    groups: dict[str, list[tuple[Any, Cell]]] = {}
    for cell in shown:
        value = cell.settings[axis]
        if value is not None:
            runs = {one.run for one in shown}
            run = f"{cell.run}: " if len(runs) > 1 else ""
            groups.setdefault(run + name_of(cell.first, [name for name in names if name != axis]), []).append(
                (value, cell)
            )
    places = sorted({value for group in groups.values() for value, _ in group})
    if max((len({value for value, _ in group}) for group in groups.values()), default=0) < 2:
        return None
    scale = Scale.of(f"{unit}/s", [cell.value(metric) for cell in shown])
    series = [
        Series(
            label,
            [
                (float(places.index(value)), (cell.value(metric) or 0.0) * scale.factor)
                for value, cell in sorted(group, key=lambda item: float(item[0]))
            ],
            roles[id(group[0][1])],
            dots=True,
        )
        for label, group in groups.items()
    ]
    ticks = [(float(place), f"{value:g}") for place, value in enumerate(places)]
    title = f"Throughput by {_ORDERED[axis].split(',')[0]}, {scale.unit}"
    return Chart(
        f"throughput-{unit}-by-{axis}",
        title,
        "At the median step. Values of the horizontal axis are evenly spaced.",
        title
        + ": "
        + "; ".join(
            f"{one.label} {', '.join(scale.text(y / scale.factor) for _, y in one.points)}" for one in series
        ),
        lambda width: lines(
            series, width, _ORDERED[axis], f"throughput, {scale.unit}", ticks=ticks, zero=True
        ),
    )


def _steps(cells: Sequence[Cell], roles: Mapping[int, str]) -> Chart | None:
    rows, thinned = [], False
    scale = Scale.of("ms", [cell.value("step/p50_ms") for cell in cells])
    for cell in cells:
        times = [
            ms * scale.factor
            for record in cell.measured_records
            for ms in slowest([rank.step_ms for rank in record.ranks])
        ]
        if not times:
            continue
        low, middle, high = (quantile(times, fraction) for fraction in (0.1, 0.5, 0.9))
        shown = times[:: -(-len(times) // DOTS)]
        thinned = thinned or len(shown) < len(times)
        text = scale.text(middle / scale.factor)
        rows.append(Strip(cell.label, shown, middle, low, high, roles[id(cell)], text))
    if not rows:
        return None
    each = f"Each dot is a step{' (a share of them, evenly taken)' if thinned else ''}"
    note = (
        f"{each} of its slowest rank; the line is the median, the band holds 80 % of the steps. "
        "The axis does not start at 0."
    )
    label = "Median step: " + "; ".join(f"{row.label} {row.text} {scale.unit}" for row in rows)
    return Chart(
        "steps", f"Step time, {scale.unit}", note, label, lambda width: strips(rows, width, scale.unit)
    )


def _communication(cells: Sequence[Cell], roles: Mapping[int, str]) -> Chart | None:
    shown = [cell for cell in cells if cell.value("comm/cost_ms") is not None]
    if not shown:
        return None
    scale = Scale.of("ms", [cell.value("step/p50_ms") for cell in shown])
    rows = []
    for cell in shown:
        step, twin, cost = (
            cell.value(name) or 0.0 for name in ("step/p50_ms", "comm/twin_p50_ms", "comm/cost_ms")
        )
        measured = cell.measure("comm/cost_ms")
        error = (measured.error if measured is not None else None) or 0.0
        known = cost > error and step > 0
        text = f"{scale.text(twin)} + {scale.text(cost)}" if known else scale.text(step)
        if known:
            extra = f"{cost / step:.0%} of the step".replace("%", " %")
        else:
            extra = "faster than its twin" if -cost > error else "within the noise"
        parts = [
            Part(min(twin, step), "soft", title=f"compute only: {scale.text(twin)} {scale.unit}"),
            Part(
                max(step - twin, 0.0),
                roles[id(cell)],
                title=f"communication: {scale.text(cost)} {scale.unit}",
            ),
        ]
        rows.append(Row(cell.label, parts, text, extra, error=error))
    note = (
        "The grey part is the compute-only twin: the same processes and batches with nothing communicated. The rest of "
        "the median step is what communication, and waiting for it, costs."
    )
    label = "Compute plus communication: " + "; ".join(f"{row.label} {row.text} {scale.unit}" for row in rows)
    title = f"What communication costs, {scale.unit} a step"
    return Chart("communication", title, note, label, lambda width: bars(rows, width))


def _phases(cells: Sequence[Cell]) -> Chart | None:
    shown = [cell for cell in cells if cell.value("phase/forward_ms") is not None]
    if not shown:
        return None
    sums = [sum(cell.value(f"phase/{name}_ms") or 0.0 for name, _ in _PHASES) for cell in shown]
    scale = Scale.of("ms", sums)
    rows, exposes = [], False
    for cell in shown:
        values = [(name, role, cell.value(f"phase/{name}_ms") or 0.0) for name, role in _PHASES]
        exposed = cell.value("comm/exposed_ms")
        exposes = exposes or exposed is not None
        rows.append(
            Row(
                cell.label,
                [
                    Part(max(value, 0.0), role, title=f"{name}: {scale.text(value)} {scale.unit}")
                    for name, role, value in values
                ],
                " + ".join(scale.text(value) for _, _, value in values),
                under=None
                if exposed is None
                else Part(
                    max(exposed, 0.0),
                    "text",
                    title=f"waits for communication: {scale.text(exposed)} {scale.unit}",
                ),
            )
        )
    legend = tuple((role, name) for name, role in _PHASES)
    note = "Medians of a few extra steps, each part waited for by itself: they may add up to more than a measured step."
    if exposes:
        note += (
            " The thin line below a bar: how long the step waits for communication with nothing else to do."
        )
        legend += (("text", "exposed communication"),)
    label = "Forward, backward, optimizer: " + "; ".join(
        f"{row.label} {row.text} {scale.unit}" for row in rows
    )
    return Chart(
        "phases", f"Phases of a step, {scale.unit}", note, label, lambda width: bars(rows, width), legend
    )


def _state(cells: Sequence[Cell]) -> Chart | None:
    shown = [cell for cell in cells if cell.value("memory/state_mib") is not None]
    if not shown:
        return None
    scale = Scale.of("MiB", [cell.value("memory/state_mib") for cell in shown])
    rows = []
    for cell in shown:
        lines_ = [rank.memory_bytes for rank in cell.first.ranks if rank.memory_bytes is not None]
        most = max(lines_, key=lambda line: line.get("total", 0))
        total, formula = cell.value("memory/state_mib") or 0.0, cell.value("memory/state_predicted_mib")
        kinds = [(name, role, most.get(name, 0) / MIB) for name, role in _KINDS]
        kinds.append(("buffers and buckets", "soft", max(total - sum(value for _, _, value in kinds), 0.0)))
        parts = [
            Part(value, role, title=f"{name}: {scale.text(value)} {scale.unit}")
            for name, role, value in kinds
            if value > 0
        ]
        extra = ""
        if formula is not None:
            extra = "as planned" if formula == total else f"planned {scale.text(formula)}"
        rows.append(Row(cell.label, parts, scale.text(total), extra, mark=formula))
    note = (
        "Counted at the end of backward on the rank that holds most; the upright line is the figure planned from the "
        "layout alone."
    )
    legend = (*((role, name) for name, role in _KINDS), ("soft", "buffers and buckets"))
    label = "Model state: " + "; ".join(f"{row.label} {row.text} {scale.unit} ({row.extra})" for row in rows)
    title = f"Model state beside its formula, {scale.unit} a rank"
    return Chart("state", title, note, label, lambda width: bars(rows, width), legend)


def _loss(cells: Sequence[Cell], roles: Mapping[int, str]) -> Chart | None:
    curves = []
    for cell in cells:
        points = [(float(step), value) for step, value in enumerate(cell.first.loss) if value is not None]
        if cell.status == "ok" and len(points) > 1:
            curves.append((cell, points))
    if not curves:
        return None
    values = [value for _, points in curves for _, value in points]
    span = (max(values) - min(values)) or 1.0
    shared = set.intersection(*({step for step, _ in points} for _, points in curves))
    apart = max((_range(dict(points)[step] for _, points in curves) for step in shared), default=0.0)
    ends = [points[-1][1] for _, points in curves]
    if len(curves) > 1 and apart < 0.02 * span:
        names = {max(range(len(curves)), key=lambda place: curves[place][1][-1][0]): f"all {len(curves)}"}
    elif len(curves) > _NAMED:
        extremes = ends.index(max(ends)), ends.index(min(ends))
        names = {place: curves[place][0].label for place in extremes}
    else:
        names = {place: cell.label for place, (cell, _) in enumerate(curves)}
    series = [
        Series(names.get(place, ""), points, roles[id(cell)]) for place, (cell, points) in enumerate(curves)
    ]
    note = "Mean over ranks and micro-batches; step 0 is before any update."
    if len(curves) > 1:
        note += f" At a step that all have, the curves are at most {apart:.2g} apart."
    label = "Loss, first to last: " + "; ".join(
        f"{cell.label} {points[0][1]:.4f} to {points[-1][1]:.4f}" for cell, points in curves
    )
    return Chart("loss", "Loss", note, label, lambda width: lines(series, width, "step", "loss"))


def _range(values: Iterable[float]) -> float:
    found = list(values)
    return max(found) - min(found)
