"""`zerokit bench`: its options, those of cells from the fields of `Settings`, and sweep files with values for them."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.catalogue.workloads import WORKLOADS
from zerokit.bench.record.settings import CHECKPOINTS, DEFAULT_REPEATS, MEASURED, OPTIONS, Option, Settings
from zerokit.cli.launcher_options import OPTIONS_OF, launcher_options
from zerokit.cli.launchers import given_arguments, join
from zerokit.cli.work import (
    PATH,
    CommaList,
    Name,
    experiment_option,
    json_option,
    options,
    tracking_uri_option,
)
from zerokit.documents import parse_toml, read_text
from zerokit.text import printable

if TYPE_CHECKING:
    from zerokit.launch.joined import Leader


_F = TypeVar("_F", bound=Callable[..., Any])

_NAMES: Mapping[str, click.ParamType[Any]] = {
    "engine": click.Choice(list(ENGINES)),
    "model": Name(lambda: list(WORKLOADS)),
}
"""What the catalogue knows and `Settings` does not."""


def _type_of(name: str, hint: Any, how: Option) -> click.ParamType[Any]:
    """The type of one value on the command line."""
    kind = next((one for one in typing.get_args(hint) if one is not type(None)), hint)
    if name in _NAMES:
        return _NAMES[name]
    if how.choices:
        return click.Choice(how.choices)
    if kind is float:
        low = how.above if how.minimum is None else how.minimum
        return click.FloatRange(min=low, min_open=how.above is not None)
    if kind is int:
        return click.INT if how.minimum is None else click.IntRange(min=int(how.minimum))
    return click.STRING


def _metavar_of(how: Option, hint: Any) -> str:
    if how.metavar is None and how.choices:
        numbers = isinstance(how.choices[0], int)
        several = "NAME" if how.sweep else "|".join(how.choices)
        metavar = f"{how.choices[0]}-{how.choices[-1]}" if numbers else several
    else:
        metavar = how.metavar or ("X" if "float" in str(hint) else "N")
    return f"{metavar},…" if how.sweep else metavar


def _made(name: str, hint: Any, how: Option) -> Callable[[_F], _F]:
    """The option of a field. It has no value unless one is given: `Settings` has the defaults."""
    flag, own = f"--{name.replace('_', '-')}", getattr(Settings(), name)
    text = how.help.format(engines=", ".join(ENGINES), models=", ".join(WORKLOADS))
    if hint is bool:
        both = f"{flag}/--no-{name.replace('_', '-')}" if own else flag
        text += f"  [default: {name}]" if own else ""
        return click.option(both, is_flag=True, default=None, help=text)
    default = own if how.shown_default is None else how.shown_default
    text += "" if default in (None, "") else f"  [default: {default}]"
    kind = _type_of(name, hint, how)
    return click.option(
        flag, type=CommaList(kind) if how.sweep else kind, metavar=_metavar_of(how, hint), help=text
    )


_HINTS = typing.get_type_hints(Settings)


def setting_option(
    name: str, help: str = "", default: str = "", *, several: bool = True
) -> Callable[[_F], _F]:
    """The bench's option `name` for another command, for one value or `several`; by default with the bench's help."""
    how, sweep = OPTIONS[name], "inner" if several else ""
    if not help:
        help, default = how.help, default or how.shown_default or ""
    changes: dict[str, Any] = {"sweep": sweep, "help": help, "shown_default": default}
    return _made(name, _HINTS[name], replace(how, **changes))


_CELL = {name: _made(name, _HINTS[name], how) for name, how in OPTIONS.items()}
_RUN = (
    click.option(
        "--repeats",
        type=click.IntRange(min=1),
        metavar="N",
        help="Number of rounds through all cells; every second round is in reverse order. Rounds show the noise "
        "between runs.  "
        f"[default: {DEFAULT_REPEATS} for several cells, else 1]",
    ),
    click.option(
        "--max-restarts",
        type=click.IntRange(min=0),
        metavar="N",
        default=3,
        show_default=True,
        help="Maximum number of restarts with --elastic, for ranks on this machine.",
    ),
    click.option(
        "--output",
        type=PATH,
        help="Folder of the record or sweep; for a single bench also a file ending in .json.  "
        "[default: zerokit-bench/]",
    ),
    click.option(
        "--continue",
        "continued",
        type=PATH,
        metavar="DIR",
        help="Continue the sweep in DIR: run the cells that are missing, failed or interrupted.",
    ),
    json_option("Print only the record, or the sweep with its records, on stdout."),
    tracking_uri_option,
    experiment_option,
    click.option("--no-mlflow", is_flag=True, help="Write the record, without MLflow."),
)

RESULTS = ("output", "continued", "as_json", "tracking_uri", "experiment", "no_mlflow")
HEADING_OF: Mapping[str, str] = MappingProxyType(
    {
        **{name: how.heading for name, how in OPTIONS.items()},
        "repeats": MEASURED,
        "max_restarts": CHECKPOINTS,
        **dict.fromkeys(RESULTS, "Results"),
        **dict.fromkeys(OPTIONS_OF, "Launcher"),
    }
)
"""Options by their names, and the heading of the help below which each is."""

bench_options = options(*_CELL.values(), *_RUN)
"""Adds the options to a command; its help lists them in this order."""


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
