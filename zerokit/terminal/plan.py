"""A plan: the cells that fit, best first, the cells that do not, and the command to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from zerokit.bench.record.words import count
from zerokit.formulas import MEMORY_KINDS
from zerokit.planning.cells import GIB, Plan, PlannedCell, best_of_each, hopeless
from zerokit.planning.mixed import Mixed
from zerokit.planning.timeline import StepTime
from zerokit.terminal.screen import Head, headed, line, text, unfolded
from zerokit.text import counted, in_runs, rate

_KINDS = dict(zip(MEMORY_KINDS, ("param", "grad", "optim", "bufs", "activ"), strict=True))
_LIMITS = {"inner": "inner link", "outer": "outer link", "states": "states' way"}


def show(plan: Plan, *, every: bool, page: Path | None) -> None:
    """Print the plan on stdout: `every` cell, or the best of each stage and mesh."""
    console, question, best = unfolded(), plan.question, plan.best
    ranks = f"{counted(question.world, 'rank')} on {counted(question.nodes, 'node')}"
    parameters = f"{count(plan.parameters)} parameters"
    heading = f"{plan.subject.name} ({parameters}), {ranks}, {question.cluster.device.name}"
    console.print(text(heading, "bold"))
    if fitting := plan.fitting if every else best_of_each(plan.fitting):
        shown, dropped = _fitted(_columns(plan, fitting), console.width)
        _print_table(console, shown, next((place for place, one in enumerate(fitting) if one is best), None))
        if dropped:
            left_out = f"Not shown in {console.width} columns: {', '.join(dropped)}; --json has all."
            line(console, left_out, "dim")
        line(console)
        for reason in filter(None, (plan.why, plan.bought, plan.exchanged, plan.visits)):
            line(console, reason)
        if best is not None and best.mixed is not None:
            line(console)
            _print_table(console, _kinds(best.mixed))
    if missing := plan.too_large if every else hopeless(plan):
        line(console)
        line(console, "Does not fit", "bold")
        for one in missing:
            line(console, f"{one.cell.label}: {one.lack}")
    commands = {}
    if best is not None:
        line(console)
        commands = {
            "measure": plan.bench_line,
            "train": plan.optimizer_arguments,
            "batches": plan.batches_call,
        }
    for name, command in (commands | {"page": None if page is None else str(page)}).items():
        if command is not None:
            line(console, f"{name:<9}{command}")
    line(console)
    for assumption in plan.assumptions:
        line(console, f"Assumed: {assumption}", "dim")


@dataclass(frozen=True)
class _Column:
    head: str
    cells: Sequence[str]

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.head, *self.cells)))


_LEFT = ("stage", "mesh", "in", "states", "limit", "equal", "device", "ranks")
"""Columns of words; all others are numbers, aligned on the right."""

_FIRST_TO_GO = (
    *("bufs", "grad", "param", "optim", "activ"),
    *("equal", "limit", "update ms", "wait ms", "MFU", "recompute"),
)
"""What a narrow terminal does without, in this order: a figure that is cut would be another figure."""


def _fitted(columns: Sequence[_Column], width: int) -> tuple[list[_Column], list[str]]:
    """The columns that fit into `width` characters, and the names of the others."""
    shown, dropped = list(columns), list[str]()
    for head in _FIRST_TO_GO:
        if sum(column.width + 1 for column in shown) - 1 <= width:
            break
        kept = [column for column in shown if column.head != head]
        dropped += [head] * (len(shown) - len(kept))
        shown = kept
    return shown, dropped


def _print_table(console: Console, columns: Sequence[_Column], best: int | None = None) -> None:
    """A row a cell; row `best` stands out."""
    heads = [Head(column.head, right=column.head not in _LEFT) for column in columns]
    rows = [list(map(Text, row)) for row in zip(*(column.cells for column in columns), strict=True)]
    look: dict[str, Any] = {"padding": (0, 1, 0, 0), "pad_edge": False, "header_style": "dim"}
    console.print(headed(heads, rows, bold=best, **look))


def _columns(plan: Plan, cells: Sequence[PlannedCell]) -> list[_Column]:
    """Everything that is known of the cells, as text."""
    unit = {"tokens": "tok", "images": "img"}.get(plan.subject.unit, "samples")
    columns = {"stage": [one.cell.stage_label for one in cells]}
    if any(one.cell.mesh.outer > 1 for one in cells):
        columns["mesh"] = [f"{one.cell.mesh.outer}x{one.cell.mesh.inner}" for one in cells]
    if len({one.cell.precision for one in cells}) > 1:
        columns["in"] = [one.cell.precision for one in cells]
    away = any(one.cell.states != "device" for one in cells)
    if away:
        columns["states"] = [one.cell.states for one in cells]
    columns["batch"] = [
        str(one.cell.micro_batch) + (f"×{one.cell.accumulate}" if one.cell.accumulate > 1 else "")
        for one in cells
    ]
    if plan.question.kinds:
        columns["batches"] = [mixed.batches_in_words for mixed in _mixed(cells)]
        columns["shares"] = [mixed.shares_in_words for mixed in _mixed(cells)]
    columns["recompute"] = ["yes" if one.cell.recompute else "no" for one in cells]
    for number, kind in enumerate(plan.question.kinds):
        columns[f"GiB {kind}"] = [_gib(mixed.parts[number].memory.needed) for mixed in _mixed(cells)]
    if not plan.question.kinds:
        columns["GiB"] = [_gib(one.memory.needed) for one in cells]
        columns |= {head: [_gib(one.memory.peak[kind]) for one in cells] for kind, head in _KINDS.items()}
    times = [one.time for one in cells]

    def ms(seconds: Callable[[StepTime], float]) -> list[str]:
        return ["" if time is None else _ms(seconds(time)) for time in times]

    if any(time is not None for time in times):
        columns["step ms"] = ms(lambda time: time.total_s)
        columns[f"{unit}/s/dev"] = ["" if one.time is None else rate(one.units_per_s or 0.0) for one in cells]
        columns["MFU"] = ["" if one.mfu is None else f"{one.mfu:.1%}" for one in cells]
        if away:
            columns["visits ms"] = ms(lambda time: time.visits_s)
        columns["wait ms"] = ms(lambda time: time.exposed_total_s)
        if plan.question.optimizer != "adamw":
            columns["update ms"] = ms(lambda time: time.optimizer_s)
        columns["limit"] = ["" if time is None else _LIMITS.get(time.limit, time.limit) for time in times]
    if plan.question.kinds:
        columns["equal"] = [mixed.beside_equal for mixed in _mixed(cells)]
    return [_Column(head, texts) for head, texts in columns.items()]


def _mixed(cells: Sequence[PlannedCell]) -> list[Mixed]:
    return [one.mixed for one in cells if one.mixed is not None]


def _kinds(mixed: Mixed) -> list[_Column]:
    """What each kind of device holds and computes, as text."""
    parts = mixed.parts
    columns = {
        "device": [str(part.kind) for part in parts],
        "ranks": [in_runs(part.kind.ranks) for part in parts],
        "share": [str(part.share) for part in parts],
        "batch": [str(part.samples) for part in parts],
        "GiB": [_gib(part.memory.needed) for part in parts],
        "of": [_gib(part.room_bytes) for part in parts],
    }
    columns |= {head: [_gib(part.memory.peak[kind]) for part in parts] for kind, head in _KINDS.items()}
    if all(part.time is not None for part in parts):
        columns["step ms"] = [_ms(part.time.total_s) for part in parts if part.time is not None]
    return [_Column(head, texts) for head, texts in columns.items()]


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:,.1f}" if size_bytes >= GIB else f"{size_bytes / GIB:.3f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
