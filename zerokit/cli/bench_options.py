"""The options of `zerokit bench`: those of cells from the fields of `Settings`, and those of a run."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import click

from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.catalogue.workloads import WORKLOADS
from zerokit.bench.record.options import CHECKPOINTS, DEFAULT_REPEATS, MEASURED, Option
from zerokit.bench.record.settings import OPTIONS, Settings
from zerokit.cli.launcher_options import OPTIONS_OF
from zerokit.cli.work import (
    PATH,
    CommaList,
    Name,
    experiment_option,
    json_option,
    options,
    tracking_uri_option,
)

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
        "--baseline",
        metavar="CELL",
        help="The cell of a sweep that the table and the page compare with, by its name there, such as 'FSDP2 3'.  "
        "[default: the first]",
    ),
    click.option(
        *("--output", "-o"),
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
    click.option(
        "--timeline",
        type=PATH,
        metavar="FILE",
        help="Also write the timeline of one more step on all ranks, for https://ui.perfetto.dev: units' forward and "
        "backward, gathers, reductions, waits and the update; compressed if FILE ends in .gz. Of several cells, each "
        "of zerokit's has a file in its first round, which is named after FILE and the cell.",
    ),
    json_option("Print only the record, or the sweep with its records, on stdout."),
    tracking_uri_option,
    experiment_option,
    click.option("--no-mlflow", is_flag=True, help="Write the record, without MLflow."),
)

RESULTS = (
    "output",
    "continued",
    "timeline",
    "as_json",
    "tracking_uri",
    "experiment",
    "no_mlflow",
    "baseline",
)
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
