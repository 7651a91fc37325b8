"""`zerokit bench`, and sweep files with values for its options."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerokit.cli.bench_options import HEADING_OF, bench_options
from zerokit.cli.launcher_options import launcher_options
from zerokit.cli.launchers import given_arguments, join
from zerokit.documents import parse_toml, read_text
from zerokit.text import printable

if TYPE_CHECKING:
    from zerokit.cluster.joined import Leader


def use_sweep_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Use the file's values unless the command line or the environment sets them; all pass the same checks.

    Raises `click.UsageError` for invalid TOML, an unknown option, or an invalid value.
    """
    if path is None:
        return
    try:
        content = parse_toml(read_text(path))
    except (OSError, ValueError) as error:
        raise click.UsageError(printable(f"{path} is not a TOML file of options: {error}")) from error
    known = {
        opt.removeprefix("--"): one
        for one in context.command.params
        if isinstance(one, click.Option)
        for opt in one.opts
    }
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("_", "-")
        if (option := known.get(name)) is None:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see zerokit bench --help"
            raise click.UsageError(printable(f"{path}: {key!r} is not an option of zerokit bench: {hint}"))
        if option.name in values:
            raise click.UsageError(printable(f"{path}: {name} is set twice, with - and with _"))
        given = value if isinstance(value, list) else [value]
        if strange := [one for one in given if not isinstance(one, str | int | float)]:
            kind = type(strange[0]).__name__
            raise click.UsageError(
                printable(f"{path}: {name} has a value of type {kind}: expected texts or numbers")
            )
        # As it would stand on the command line, so that both are read by the same types.
        texts = list(map(str, given))
        values[option.name or ""] = texts if option.multiple else ",".join(texts)
        try:
            option.type_cast_value(context, values[option.name or ""])
        except click.UsageError as error:
            raise click.UsageError(printable(f"{path}: {error.format_message()}")) from error
    context.default_map = values


_EPILOG = """\b
Several values after commas make a sweep of all combinations:
  zerokit bench --stage 0,1,2,3 --engine zerokit,ddp,fsdp2 --nodes 2
Without --launcher, N nodes are simulated on this machine: real ranks over loopback.
\b
Exit codes: 0 ok, 1 a cell failed, 2 wrong use, 4 nothing ran (all out of memory
or unsupported), 128 + N ended by signal N.
"""


class _Bench(click.Command):
    """Its help has headings: there are too many options for one list."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        for heading in (*dict.fromkeys(HEADING_OF.values()), "Other"):
            options = [one for one in shown if HEADING_OF.get(one.name or "", "Other") == heading]
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
    from zerokit.cli.bench_run import parse

    request = parse(context, options)
    if request.chosen.submits:
        from zerokit.cli.submission import submit

        context.exit(submit(context, request))

    def run(leader: Leader | None) -> int:
        from zerokit.cli.bench_run import run_bench

        return run_bench(request, leader)

    joins = request.chosen.member is not None
    context.exit(join(request.chosen, given_arguments(context), run) if joins else run(None))
