"""A plan for people: the cells that fit, best first, the cells that do not, and the command to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerokit.bench.record.words import count
from zerokit.cli.work import counted, rate
from zerokit.formulas import MEMORY_KINDS
from zerokit.planning.cells import GIB, Plan, PlannedCell, best_of_each, hopeless
from zerokit.planning.mixed import Mixed
from zerokit.text import in_runs, printable

_ANY_WIDTH = 1000
_KINDS = dict(zip(MEMORY_KINDS, ("param", "grad", "optim", "bufs", "activ"), strict=True))
_LIMITS = {"inner": "inner link", "outer": "outer link", "states": "states' way"}


def show(plan: Plan, *, every: bool, page: Path | None) -> None:
    """Print the plan on stdout: `every` cell, or the best of each stage and mesh."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _ANY_WIDTH
    question = plan.question
    heading = (
        f"{plan.subject.name} ({count(plan.parameters)} parameters), "
        f"{counted(question.world, 'rank')} on {counted(question.nodes, 'node')}, {question.cluster.device.name}"
    )
    console.print(Text(printable(heading), style="bold"))
    fitting = plan.fitting if every else best_of_each(plan.fitting)
    if fitting:
        shown, dropped = _fitted(_columns(plan, fitting), console.width)
        best = next((number for number, one in enumerate(fitting) if one is plan.best), None)
        console.print(_table(shown, best))
        if dropped:
            left_out = f"Not shown in {console.width} columns: {', '.join(dropped)}; --json has all."
            console.print(Text(left_out, style="dim"), soft_wrap=True)
        console.print(Text(), Text(printable(plan.why)), sep="\n", soft_wrap=True)
        for more in (plan.bought, plan.exchanged, plan.visits):
            if more is not None:
                console.print(Text(printable(more)), soft_wrap=True)
        if plan.best is not None and plan.best.mixed is not None:
            console.print(Text(), _table(_kinds(plan.best.mixed), None))
    missing = plan.too_large if every else hopeless(plan)
    if missing:
        console.print(Text(), Text("Does not fit", style="bold"), sep="\n")
        for one in missing:
            console.print(Text(printable(_missing(one))), soft_wrap=True)
    if plan.best is not None:
        console.print(Text())
        if plan.bench_line is not None:
            console.print(Text(f"measure  {printable(plan.bench_line)}"), soft_wrap=True)
        console.print(Text(printable(f"train    {plan.optimizer_arguments}")), soft_wrap=True)
        if plan.batches_call is not None:
            console.print(Text(f"batches  {plan.batches_call}"), soft_wrap=True)
    if page is not None:
        console.print(Text(f"page     {printable(str(page))}"), soft_wrap=True)
    console.print(Text())
    for text in plan.assumptions:
        console.print(Text(f"Assumed: {printable(text)}", style="dim"), soft_wrap=True)


def _missing(one: PlannedCell) -> str:
    return f"{one.cell.label}: {one.lack}"


@dataclass(frozen=True)
class _Column:
    head: str
    cells: Sequence[str]

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.head, *self.cells)))


_LEFT = ("stage", "mesh", "in", "states", "limit", "device", "ranks")
"""Columns of words; all others are numbers, aligned on the right."""

_FIRST_TO_GO = (
    "bufs",
    "grad",
    "param",
    "optim",
    "activ",
    "limit",
    "update ms",
    "wait ms",
    "MFU",
    "recompute",
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


def _table(columns: Sequence[_Column], best: int | None) -> Table:
    """A row a cell; row `best` stands out."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.head in _LEFT else "right"
        table.add_column(column.head, justify=justify, no_wrap=True, min_width=column.width)
    for number, row in enumerate(zip(*(column.cells for column in columns), strict=True)):
        table.add_row(*row, style="bold" if number == best else "")
    return table


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
    if any(time is not None for time in times):
        columns["step ms"] = ["" if time is None else f"{time.total_s * 1e3:,.1f}" for time in times]
        columns[f"{unit}/s/dev"] = ["" if one.time is None else rate(one.units_per_s or 0.0) for one in cells]
        columns["MFU"] = ["" if one.mfu is None else f"{one.mfu:.1%}" for one in cells]
        if away:
            columns["visits ms"] = ["" if time is None else f"{time.visits_s * 1e3:,.1f}" for time in times]
        columns["wait ms"] = ["" if time is None else f"{time.exposed_total_s * 1e3:,.1f}" for time in times]
        if plan.question.optimizer != "adamw":
            columns["update ms"] = [
                "" if time is None else f"{time.optimizer_s * 1e3:,.1f}" for time in times
            ]
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
        columns["step ms"] = [f"{part.time.total_s * 1e3:,.1f}" for part in parts if part.time is not None]
    return [_Column(head, texts) for head, texts in columns.items()]


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:,.1f}" if size_bytes >= GIB else f"{size_bytes / GIB:.3f}"
