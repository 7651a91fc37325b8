"""A plan for people: the cells that fit, best first, the cells that do not, and the command to run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerokit.bench.record.words import count
from zerokit.cli.work import counted, rate
from zerokit.formulas import MEMORY_KINDS
from zerokit.planning.cells import GIB, Plan, PlannedCell, best_of_each, hopeless
from zerokit.text import printable

_ANY_WIDTH = 1000
_KINDS = dict(zip(MEMORY_KINDS, ("param", "grad", "optim", "bufs", "activ"), strict=True))
_LIMITS = {"memory": "memory", "inner": "inner link", "outer": "outer link"}


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
        console.print(_table(plan, fitting), Text(), Text(printable(plan.why)), sep="\n", soft_wrap=True)
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
    if page is not None:
        console.print(Text(f"page     {printable(str(page))}"), soft_wrap=True)
    console.print(Text())
    for text in plan.assumptions:
        console.print(Text(f"Assumed: {printable(text)}", style="dim"), soft_wrap=True)


def _missing(one: PlannedCell) -> str:
    needed, missing = one.memory.needed / GIB, one.missing_bytes / GIB
    return f"{one.cell.label}: {needed:,.1f} GiB, {missing:,.1f} GiB more than there is"


def _table(plan: Plan, cells: Sequence[PlannedCell]) -> Table:
    timed = any(one.time is not None for one in cells)
    axes = any(one.cell.mesh.outer > 1 for one in cells)
    several = len({one.cell.precision for one in cells}) > 1
    unit = {"tokens": "tok", "images": "img"}.get(plan.subject.unit, "samples")
    heads = ["stage", *(["mesh"] if axes else []), *(["in"] if several else []), "batch", "recompute", "GiB"]
    heads += _KINDS.values()
    heads += ["step ms", f"{unit}/s/dev", "MFU", "wait ms", "limit"] if timed else []
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for head in heads:
        table.add_column(
            head, justify="left" if head in ("stage", "mesh", "in", "limit") else "right", no_wrap=True
        )
    for one in cells:
        cell, time = one.cell, one.time
        row = [cell.stage_label]
        row += [f"{cell.mesh.outer}x{cell.mesh.inner}"] if axes else []
        row += [cell.precision] if several else []
        row += [
            str(cell.micro_batch) + (f"×{cell.accumulate}" if cell.accumulate > 1 else ""),
            "yes" if cell.recompute else "no",
            _gib(one.memory.needed),
            *(_gib(one.memory.peak[kind]) for kind in _KINDS),
        ]
        if time is not None:
            row += [
                f"{time.total_s * 1e3:,.1f}",
                rate(one.units_per_s or 0.0),
                "" if one.mfu is None else f"{one.mfu:.1%}",
                f"{time.exposed_total_s * 1e3:,.1f}",
                _LIMITS.get(time.limit, time.limit),
            ]
        table.add_row(*row, style="bold" if one is plan.best else "")
    return table


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:,.1f}" if size_bytes >= GIB else f"{size_bytes / GIB:.3f}"
