"""The doctor's report for people: passed checks in a table, then warnings, and faults last, nearest to the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zerokit.cli.columns import annotate
from zerokit.cli.work import counted
from zerokit.doctor.examine import Report
from zerokit.doctor.findings import Finding, Severity
from zerokit.text import printable

_STYLES = {
    Severity.OK: "green",
    Severity.SKIPPED: "dim",
    Severity.WARNING: "yellow",
    Severity.FAULT: "bold red",
}
_GAP = 2


def show(report: Report) -> None:
    """Print the report on stdout."""
    console = Console(highlight=False)
    console.print(Group(*report_tables(report, console.width)))


def report_tables(report: Report, width: int) -> list[RenderableType]:
    """The parts of the report, from top to bottom; `width` is the terminal's, in characters."""
    quiet = [one for one in report.findings if one.severity in (Severity.OK, Severity.SKIPPED)]
    parts: list[RenderableType] = [_heading(report), Text(), _table(quiet, width)]
    for kind in (Severity.WARNING, Severity.FAULT):
        for one in report.findings:
            if one.severity is kind:
                parts += [Text(), *_explained(one)]
    return [*parts, Text(), _summary(report)]


def _heading(report: Report) -> Text:
    plan = report.plan
    what = (
        "this machine, no ranks started"
        if report.quick
        else f"{counted(plan.nodes, 'node')} × {counted(plan.nproc_per_node, 'rank')}"
    )
    return Text(f"zerokit doctor: {report.here.seat.host}, {what}", style="bold")


def _table(findings: Sequence[Finding], width: int) -> RenderableType:
    rows = []
    for one in findings:
        style = "dim" if one.severity is Severity.SKIPPED else ""
        text = f"{one.where}: {one.found}" if one.where else one.found
        cells = (
            Text(one.severity, _STYLES[one.severity]),
            Text(one.code, style),
            Text(one.check, style),
        )
        rows.append((cells, Text(printable(text), style)))
    return annotate(rows, width)


def _explained(one: Finding) -> list[RenderableType]:
    head = Text()
    head.append(one.severity, _STYLES[one.severity])
    head.append(f"  {one.code}  {one.check}", "bold")
    if one.where:
        head.append(f", {printable(one.where)}")
    lines = Table(box=None, padding=(0, _GAP, 0, 0), show_header=False, pad_edge=False)
    lines.add_column("what", no_wrap=True, style="dim")
    lines.add_column("text", overflow="fold")
    for name, text in (("found", one.found), ("means", one.meaning), ("do", one.remedy)):
        if text:
            lines.add_row(name, Text(printable(text)))
    return [head, Padding(lines, (0, 0, 0, _GAP))]


def _summary(report: Report) -> Text:
    counts = report.counts()
    faults, warnings = counts[Severity.FAULT], counts[Severity.WARNING]
    style = _STYLES[Severity.FAULT if faults else Severity.WARNING if warnings else Severity.OK]
    answers = ", ".join(
        [
            counted(faults, "fault") if faults else "no fault",
            counted(warnings, "warning") if warnings else "no warning",
            f"{counts[Severity.OK]} ok",
            *([f"{counts[Severity.SKIPPED]} skipped"] if counts[Severity.SKIPPED] else []),
        ]
    )
    return Text(answers, style=style)
