"""`zerokit bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerokit.cli.bench_options import HEADINGS, bench_options, use_sweep_file
from zerokit.cli.launcher_options import OPTIONS_OF, launcher_options
from zerokit.cli.launchers import FromFile, given_arguments, join

if TYPE_CHECKING:
    from zerokit.launch.joined import Leader

_EPILOG = """\b
Several values after commas make a sweep of all combinations:
  zerokit bench --stage 0,1,2,3 --engine zerokit,ddp,fsdp2 --nodes 2
Without --launcher, N nodes are N torchrun agents on this machine: real ranks over loopback.
\b
Exit codes: 0 ok, 1 a cell failed, 2 wrong use, 4 nothing ran (all out of memory
or unsupported), 128 + N ended by signal N.
"""


class _Bench(FromFile):
    """Its help has headings: there are too many options for one list."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = {**HEADINGS, "Launcher": tuple(OPTIONS_OF)}
        heading_of = {name: heading for heading, names in groups.items() for name in names}
        for heading in (*groups, "Other"):
            options = [
                one
                for one in self.get_params(ctx)
                if isinstance(one, click.Option) and heading_of.get(one.name or "", "Other") == heading
            ]
            with formatter.section(heading):
                formatter.write_dl(
                    [record for one in options if (record := one.get_help_record(ctx)) is not None]
                )


@click.command(cls=_Bench, epilog=_EPILOG)
@click.argument(
    "sweep_file",
    required=False,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="[SWEEP.toml]",
    is_eager=True,
    expose_value=False,
    callback=use_sweep_file,
)
@bench_options
@launcher_options
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Train models for some steps, measure them, write records and MLflow runs.

    A step takes as long as on its slowest rank; warm-up is not measured. The record is a JSON file with every step
    time of every rank. The MLflow run is written from it after the ranks have ended. A sweep ends with a table and an
    HTML report. SWEEP.toml holds values of these options by their names, such as stage = [0, 1, 2, 3]; the command line
    and the environment override it.
    """
    from zerokit.cli.bench_request import parse

    request = parse(context, options)
    if request.chosen.submits:
        from zerokit.cli.submission import submit

        context.exit(submit(context, request))

    def run(leader: Leader | None) -> int:
        from zerokit.cli.bench_run import run_bench

        return run_bench(request, leader)

    joins = request.chosen.member is not None
    context.exit(join(request.chosen, given_arguments(context), run) if joins else run(None))
