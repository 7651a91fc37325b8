"""The page of a plan: the cells, memory by kind, one step's time line, and how throughput scales."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import altair as alt

from zerokit.bench.comparison.tables import Scale
from zerokit.bench.plans.ask import hopeless
from zerokit.bench.record.words import count
from zerokit.bench.report.pictures import Picture, Row, colour, data_of, draw_bars
from zerokit.bench.report.render import document, write_page
from zerokit.errors import UsageError
from zerokit.formulas import MEMORY_KINDS
from zerokit.placement import Mesh, Placement
from zerokit.planning.cells import GIB, Plan, PlannedCell, best_of_each
from zerokit.planning.memory import element_sizes
from zerokit.planning.subject import Traces
from zerokit.planning.timeline import Plan as Timed
from zerokit.planning.timeline import step_time
from zerokit.runtime.precision import Precision

_SHORT = {kind: kind.split()[0] for kind in MEMORY_KINDS}
"""Headings and labels that a narrow page has room for."""
_ROLES = dict(zip(_SHORT.values(), ("first", "third", "second", "soft", "fourth"), strict=True))
_LANES = {"compute": "first", "inner": "third", "outer": "second"}
_MOST_ROWS = 14
_MOST_SPANS = 400


def write_plan(plan: Plan, path: Path) -> None:
    """Write the page as one self-contained file. Raises `ZerokitError` where the disk refuses it."""
    text = document(
        "plan.html.jinja",
        pictures(plan),
        parameters=count(plan.parameters),
        plan=plan,
        cells=best_of_each(plan.fitting),
        hopeless=hopeless(plan),
        kinds=_SHORT,
        gib=GIB,
    )
    write_page(text, path)


def pictures(plan: Plan) -> list[Picture]:
    """The pictures of this plan."""
    found = [_memory(plan)] if plan.fitting or plan.too_large else []
    if plan.best is not None and plan.best.time is not None:
        found += [_step(plan.best), *_scaling(plan, plan.best)]
    return found


def _memory(plan: Plan) -> Picture:
    rows = []
    for one in best_of_each([*best_of_each(plan.fitting), *best_of_each(plan.too_large)])[:_MOST_ROWS]:
        sizes = {**{_SHORT[kind]: size for kind, size in one.memory.peak.items()}, "CUDA": one.memory.context}
        parts = [(kind, size / GIB, kind) for kind, size in sizes.items()]
        room = None if one.room_bytes is None else one.room_bytes / GIB
        rows.append(Row(_name(one), f"{one.memory.needed / GIB:,.1f} GiB", parts, mark=room))
    title = "Memory of a rank at its peak"
    return draw_bars("memory", title, rows, Scale("GiB", 1.0, 1), {**_ROLES, "CUDA": "muted"})


def _name(one: PlannedCell) -> str:
    cell = one.cell
    mesh = f" on {cell.mesh.outer}x{cell.mesh.inner}" if cell.mesh.outer > 1 else ""
    return f"{cell.stage_label}{mesh}, batch {cell.micro_batch}" + (", recompute" if cell.recompute else "")


def _step(best: PlannedCell) -> Picture:
    assert best.time is not None
    events = sorted(best.time.events, key=lambda event: event.start_s - event.stop_s)[:_MOST_SPANS]
    rows = [
        {"lane": event.lane, "what": event.name, "from": event.start_s * 1e3, "to": event.stop_s * 1e3}
        for event in events
    ]
    lanes = [lane for lane in _LANES if any(row["lane"] == lane for row in rows)]
    shades = alt.Scale(domain=lanes, range=[colour(_LANES[lane]) for lane in lanes])
    plot = (
        data_of(rows)
        .mark_bar(height=18, stroke=colour("ground"), strokeWidth=0.5)
        .encode(
            x=alt.X("from:Q", axis=alt.Axis(title="ms", titleAnchor="end", grid=False, tickCount=6)),
            x2="to:Q",
            y=alt.Y("lane:N", sort=lanes, axis=alt.Axis(title=None)),
            color=alt.Color("lane:N", scale=shades, legend=None),
            tooltip=["what:N", alt.Tooltip("from:Q", format=".4~g"), alt.Tooltip("to:Q", format=".4~g")],
        )
        .properties(height=36 * len(lanes))
    )
    label = f"One step of {best.cell.label}: {best.time.total_s * 1e3:,.1f} ms"
    return Picture("step", f"One step: {best.cell.label}", label, plot.to_dict())


def _scaling(plan: Plan, best: PlannedCell) -> list[Picture]:
    """Throughput of a device where the best cell's stages and micro-batch run on fewer and on more nodes."""
    question, cell = plan.question, best.cell
    efficiency = question.efficiencies[cell.precision]
    traces = Traces(plan.subject, on_cuda=question.on_cuda, bucket_mb=question.bucket_mb)
    trace = traces.get(cell.micro_batch, cell.precision, recompute=cell.recompute)
    sizes = element_sizes(Precision.of(cell.precision))
    points = []
    for world in _worlds(question.world, cell.mesh):
        mesh = Mesh(1, world) if cell.mesh.outer == 1 else Mesh(world // cell.mesh.inner, cell.mesh.inner)
        stage = cell.stages if mesh.outer > 1 else cell.stages[1]
        timed = Timed(
            trace.work,
            trace.layout.for_world(world),
            Placement.of(stage, mesh),
            sizes,
            micro_batches=cell.accumulate,
        )
        try:
            time = step_time(timed, question.cluster, efficiency)
        except UsageError:  # a link that these ranks need and nobody knows
            continue
        points.append((float(world), trace.work.tokens * cell.accumulate / time.total_s))
    if len(points) < 2:
        return []
    unit = f"{plan.subject.unit}/s a device"
    rows = [{"devices": x, "rate": y} for x, y in points]
    ticks = [x for x, _ in points]
    x = alt.X(
        "devices:Q",
        scale=alt.Scale(type="log", base=2, domain=[ticks[0], ticks[-1]]),
        axis=alt.Axis(values=ticks, format=",~g", titleAnchor="end", grid=False),
    )
    y = alt.Y("rate:Q", scale=alt.Scale(zero=True), axis=alt.Axis(title=None, format="~s"))
    tooltip = [alt.Tooltip("devices:Q"), alt.Tooltip("rate:Q", title=unit, format=",.0f")]
    line = data_of(rows).mark_line(point=True, color=colour("first")).encode(x=x, y=y, tooltip=tooltip)
    label = "Throughput a device: " + ", ".join(f"{y:,.0f} at {x:,.0f}" for x, y in points)
    title = f"{unit[0].upper()}{unit[1:]}, by the number of devices"
    return [Picture("scaling", title, label, line.properties(height=220).to_dict())]


def _worlds(world: int, mesh: Mesh) -> Sequence[int]:
    """From one node, or inner axis, to four times as many ranks."""
    first = mesh.inner if mesh.outer > 1 else 1
    found: list[int] = []
    size = world
    while size >= first and size % first == 0 and len(found) < 6:
        found.append(size)
        if size % 2:
            break
        size //= 2
    return [*reversed(found), 2 * world, 4 * world]
