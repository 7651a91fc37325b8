"""`zerokit doctor`: passed checks are in a table, then come warnings, and faults last, nearest to the prompt."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zerokit.cli.bench_options import setting_option
from zerokit.cli.details import NARROWEST, annotate
from zerokit.cli.launcher_options import launcher_options, take_options
from zerokit.cli.launchers import Chosen, choose_launcher, given_arguments, join
from zerokit.cli.work import PATH, Finite, counted, json_option, print_json, tracking_uri_option
from zerokit.doctor.findings import Finding, Severity
from zerokit.text import printable

if TYPE_CHECKING:
    from zerokit.doctor.examine import Plan, Report
    from zerokit.launch.joined import Leader


_EPILOG = """\b
Exit codes: 0 no fault (there may be warnings), 1 failure, 2 wrong use,
5 a fault was found, 128 + N ended by signal N.
"""


@click.command(epilog=_EPILOG)
@click.argument("directory", metavar="[RUN_DIRECTORY]", default=".", type=PATH)
@setting_option("nodes", several=False)
@setting_option(
    "nproc_per_node",
    default="its visible CUDA devices, divided equally among simulated nodes; without devices 1, or 2 on a single node",
    several=False,
)
@click.option(
    "--quick", is_flag=True, help="Check this process only, in a second: no ranks, no measurements."
)
@click.option("--pairs", is_flag=True, help="Measure the bandwidth between all pairs of nodes.")
@click.option(
    "--timeout",
    type=Finite(min=0, max=1e6, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for all ranks together.",
)
@tracking_uri_option
@json_option("Print findings, and facts by rank, as one JSON document on stdout.")
@launcher_options
@click.pass_context
def command(
    context: click.Context,
    /,
    directory: Path,
    nodes: int | None,
    nproc_per_node: int | None,
    quick: bool,
    pairs: bool,
    timeout: float,
    tracking_uri: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find what would make training fail, hang or crawl.

    Looks at software, devices, network, limits, clocks and disks on every rank, measures the wire between them, and
    asks the tracking store. RUN_DIRECTORY is where runs would write; by default the working directory. A file is
    written there and removed.
    """
    from zerokit.bench.machine.host import visible_devices
    from zerokit.bench.tracking.store import resolve_uri
    from zerokit.doctor.examine import Plan

    if quick and pairs:
        raise click.UsageError("--pairs needs ranks, and --quick starts none")
    chosen = choose_launcher(take_options(options), {} if quick else os.environ)
    if chosen.submits:
        raise click.UsageError(
            "the doctor examines running nodes: start it inside an allocation (salloc, sbatch) or a pod"
        )
    nodes = nodes or chosen.nodes or 1
    if pairs and nodes < 2:
        raise click.UsageError("--pairs compares nodes, and there is only one: give --nodes 2 or more")
    devices = len(visible_devices()) // (nodes if chosen.here else 1)
    plan = Plan(
        nodes=nodes,
        # A rank alone on one node would have nobody to meet.
        nproc_per_node=nproc_per_node or chosen.nproc_per_node or devices or (2 if nodes == 1 else 1),
        directory=directory,
        tracking_uri=resolve_uri(tracking_uri),
        pairs=pairs,
        timeout_s=timeout,
    )

    chosen.require_world(plan.nodes, plan.nproc_per_node)

    def run(leader: Leader | None) -> int:
        report = _examined(plan, chosen, leader, quick)
        if as_json:
            print_json(report.plain())
        else:
            show(report)
        return report.exit_code

    context.exit(run(None) if chosen.member is None else join(chosen, given_arguments(context), run))


def _examined(plan: Plan, chosen: Chosen, leader: Leader | None, quick: bool) -> Report:
    from zerokit.doctor.examine import examine, examine_quickly
    from zerokit.launch.interrupts import Interrupts

    if quick:
        return examine_quickly(plan)
    console = Console(stderr=True, highlight=False)
    with Interrupts() as interrupts, console.status("looking around") as status:
        return examine(
            plan, chosen.launch(interrupts, leader), lambda text: status.update(Text(printable(text)))
        )


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
    console.width = max(console.width, NARROWEST)
    quiet = [one for one in report.findings if one.severity in (Severity.OK, Severity.SKIPPED)]
    console.print(_heading(report), Text(), _table(quiet), sep="\n")
    for kind in (Severity.WARNING, Severity.FAULT):
        for one in report.findings:
            if one.severity is kind:
                console.print(Text(), *_explained(one), sep="\n")
    console.print(Text(), _summary(report), sep="\n")


def _heading(report: Report) -> Text:
    plan = report.plan
    what = (
        "this machine, no ranks started"
        if report.quick
        else f"{counted(plan.nodes, 'node')} × {counted(plan.nproc_per_node, 'rank')}"
    )
    return Text(f"zerokit doctor: {report.here.seat.host}, {what}", style="bold")


def _table(findings: Sequence[Finding]) -> Table:
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
    return annotate(rows)


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
