"""The page of a plan: the cells, memory by kind, and one step's time line."""

from __future__ import annotations

from pathlib import Path

import altair as alt

from zerokit.bench.comparison.tables import Scale
from zerokit.bench.record.words import count
from zerokit.bench.report.pictures import Picture, Row, colour, data_of, draw_bars
from zerokit.bench.report.render import document, write_page
from zerokit.formulas import MEMORY_KINDS
from zerokit.planning.cells import GIB, Plan, PlannedCell, best_of_each, hopeless
from zerokit.planning.memory import PlannedMemory
from zerokit.text import in_runs

_SHORT = {kind: kind.split()[0] for kind in MEMORY_KINDS}
"""Headings and labels that a narrow page has room for."""
_ROLES = dict(zip(_SHORT.values(), ("first", "third", "second", "soft", "fourth"), strict=True))
_LANES = {"compute": "first", "inner": "third", "outer": "second", "host": "fourth", "disk": "fourth"}
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
        away=any(one.cell.states != "device" for one in plan.fitting),
        hopeless=hopeless(plan),
        kinds=_SHORT,
        in_runs=in_runs,
        gib=GIB,
    )
    write_page(text, path)


def pictures(plan: Plan) -> list[Picture]:
    """The pictures of this plan."""
    found = [_memory(plan)] if plan.fitting or plan.too_large else []
    if plan.best is not None and plan.best.time is not None:
        found.append(_step(plan.best))
    return found


def _memory(plan: Plan) -> Picture:
    rows = []
    for one in best_of_each([*best_of_each(plan.fitting), *best_of_each(plan.too_large)])[:_MOST_ROWS]:
        if one.mixed is None:
            rows.append(_bar(_name(one), one.memory, one.room_bytes))
            continue
        for part in one.mixed.parts:
            name = f"{_name(one)}: {part.samples} on {part.kind}"
            rows.append(_bar(name, part.memory, part.room_bytes))
    title = "Memory of a rank at its peak"
    return draw_bars("memory", title, rows, Scale("GiB", 1.0, 1), {**_ROLES, "CUDA": "muted"})


def _bar(name: str, memory: PlannedMemory, room_bytes: int | None) -> Row:
    sizes = {**{_SHORT[kind]: size for kind, size in memory.peak.items()}, "CUDA": memory.context}
    parts = [(kind, size / GIB, kind) for kind, size in sizes.items()]
    room = None if room_bytes is None else room_bytes / GIB
    return Row(name, f"{memory.needed / GIB:,.1f} GiB", parts, mark=room)


def _name(one: PlannedCell) -> str:
    cell = one.cell
    mesh = f" on {cell.mesh.outer}x{cell.mesh.inner}" if cell.mesh.outer > 1 else ""
    words = [f"{cell.stage_label}{mesh}, batch {cell.micro_batch}"]
    if cell.recompute:
        words.append("recompute")
    if cell.states != "device":
        words.append("fp8" if cell.states == "fp8" else f"on {cell.states}")
    return ", ".join(words)


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
