"""The doctor's report: passed checks in a table, then warnings, and faults last, nearest to the prompt."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zerokit.doctor.examine import Report
from zerokit.doctor.findings import Finding, Severity
from zerokit.terminal.screen import NARROWEST, grid, text
from zerokit.text import counted

_STYLES = {
    Severity.OK: "green",
    Severity.SKIPPED: "dim",
    Severity.WARNING: "yellow",
    Severity.FAULT: "bold red",
}


def show(report: Report) -> None:
    """Print the report on stdout."""
    console = Console(highlight=False)
    console.width = max(console.width, NARROWEST)
    plan = report.plan
    shape = f"{counted(plan.nodes, 'node')} × {counted(plan.nproc_per_node, 'rank')}"
    what = "this machine, no ranks started" if report.quick else shape
    heading = Text(f"zerokit doctor: {report.here.seat.host}, {what}", "bold")
    console.print(heading, Text(), _passed(report), sep="\n")
    for kind in (Severity.WARNING, Severity.FAULT):
        for one in report.findings:
            if one.severity is kind:
                console.print(Text(), _heading(one), Padding(_explanation(one), (0, 0, 0, 2)), sep="\n")
    console.print(Text(), _summary(report), sep="\n")


def _passed(report: Report) -> Table:
    rows = []
    for one in report.findings:
        if one.severity in (Severity.OK, Severity.SKIPPED):
            style = "dim" if one.severity is Severity.SKIPPED else ""
            found = f"{one.where}: {one.found}" if one.where else one.found
            severity = Text(one.severity, _STYLES[one.severity])
            rows.append((severity, *(text(cell, style) for cell in (one.code, one.check, found))))
    return grid(rows)


def _heading(one: Finding) -> Text:
    where = f", {one.where}" if one.where else ""
    severity = (one.severity, _STYLES[one.severity])
    return Text.assemble(severity, (f"  {one.code}  {one.check}", "bold"), text(where))


def _explanation(one: Finding) -> Table:
    parts = {"found": one.found, "means": one.meaning, "do": one.remedy}
    return grid([(Text(name, "dim"), text(part)) for name, part in parts.items() if part])


def _summary(report: Report) -> Text:
    counts = report.counts()
    faults, warnings, skipped = (
        counts[kind] for kind in (Severity.FAULT, Severity.WARNING, Severity.SKIPPED)
    )
    answers = [
        counted(faults, "fault") if faults else "no fault",
        counted(warnings, "warning") if warnings else "no warning",
        f"{counts[Severity.OK]} ok",
        *([f"{skipped} skipped"] if skipped else []),
    ]
    worst = Severity.FAULT if faults else Severity.WARNING if warnings else Severity.OK
    return Text(", ".join(answers), _STYLES[worst])
