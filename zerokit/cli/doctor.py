"""`zerokit doctor`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerokit.cli.bench_options import setting_option
from zerokit.cli.launcher_options import launcher_options, take_options
from zerokit.cli.launchers import Chosen, choose_launcher, given_arguments, join
from zerokit.cli.work import PATH, Finite, json_option, print_json, tracking_uri_option

if TYPE_CHECKING:
    from zerokit.cluster.joined import Leader
    from zerokit.doctor.examine import Plan, Report


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
            from zerokit.terminal.doctor import show

            show(report)
        return report.exit_code

    context.exit(run(None) if chosen.member is None else join(chosen, given_arguments(context), run))


def _examined(plan: Plan, chosen: Chosen, leader: Leader | None, quick: bool) -> Report:
    from rich.console import Console

    from zerokit.doctor.examine import examine, examine_quickly
    from zerokit.interrupts import Interrupts
    from zerokit.terminal.screen import text

    if quick:
        return examine_quickly(plan)
    console = Console(stderr=True, highlight=False)
    with Interrupts() as interrupts, console.status("looking around") as status:
        return examine(plan, chosen.launch(interrupts, leader), lambda phase: status.update(text(phase)))
