"""What a command line of `zerokit bench` asks for, and its output."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from zerokit.bench.benches import Asked, open_sweep, require_baseline, run_single, run_sweep
from zerokit.bench.catalogue.engines import this_machine
from zerokit.bench.machine.host import visible_devices
from zerokit.bench.record.options import CHECKPOINTS
from zerokit.bench.record.settings import DIMENSIONS, OPTIONS, Settings
from zerokit.bench.run.session import Host
from zerokit.bench.run.sweep import exit_code, product
from zerokit.bench.tracking.store import Tracking, resolve_uri
from zerokit.cli.bench_options import RESULTS
from zerokit.cli.launcher_options import take_options
from zerokit.cli.launchers import Chosen, choose_launcher, given_arguments, is_given
from zerokit.cluster.joined import Leader
from zerokit.errors import UsageError
from zerokit.interrupts import Interrupted, Interrupts
from zerokit.launch.limits import missing
from zerokit.terminal.display import Display
from zerokit.text import printable_json, without_secrets

_LIMITED = (
    "--cores-per-rank and --memory-per-rank are for ranks that zerokit starts here: leave --launcher out"
)
_CHECKPOINTS = [name for name, how in OPTIONS.items() if how.heading == CHECKPOINTS]
"""Settings for a single bench: cells that write the same checkpoints would continue each other's."""


@dataclass(frozen=True, kw_only=True)
class Request(Asked):
    """What the command line asks for.

    Attributes:
        chosen: who starts the ranks.
        as_json: whether stdout is for a program.
        max_restarts: of an elastic bench whose ranks are started here.
    """

    chosen: Chosen
    as_json: bool
    max_restarts: int


def parse(context: click.Context, options: dict[str, Any]) -> Request:
    """Parse the command line's options; raises `click.UsageError` if they contradict each other."""
    output, continued, timeline, as_json, tracking_uri, experiment, no_mlflow, baseline, max_restarts = (
        options.pop(name) for name in (*RESULTS, "max_restarts")
    )
    if continued is not None:
        _require_alone(context)
    elastic = bool(options["elastic"])
    chosen = choose_launcher(take_options(options), os.environ, elastic=elastic)
    if not (elastic and chosen.name == "local") and is_given(context, "max_restarts"):
        raise UsageError(
            "--max-restarts is for --elastic with ranks on this machine; torchrun has its own option"
        )
    dimensions = {name: tuple(options.pop(name) or ()) for name in DIMENSIONS}
    cells = _cells(dimensions, options, chosen, continued=continued is not None)
    if len(cells) > 1 and any(options[name] for name in _CHECKPOINTS):
        raise UsageError(
            "checkpoints belong to one bench: give --save, --resume and --elastic without a sweep"
        )
    if len(cells) > 1 and output is not None and output.suffix == ".json":
        raise UsageError(f"a sweep needs a folder: --output {output} names a file")
    if timeline is not None and chosen.name == "kubernetes":
        raise UsageError("--timeline would be lost with its pod: run the bench inside a pod, with a volume")
    if continued is None:
        require_baseline(baseline, cells)
    return Request(
        chosen=chosen,
        cells=cells,
        options=_chosen_options(context, dimensions) | ({"baseline": baseline} if baseline else {}),
        output=output,
        continued=continued,
        tracking=None if no_mlflow else Tracking(resolve_uri(tracking_uri), experiment),
        as_json=as_json,
        max_restarts=max_restarts if chosen.name == "local" else 0,
        given="".join(
            f" {shlex.quote(without_secrets(word))}"
            for word in given_arguments(context, only=("tracking_uri", "experiment", "no_mlflow"))
        ),
        baseline=baseline,
        timeline=timeline,
    )


def _cells(
    dimensions: dict[str, tuple[Any, ...]], options: Mapping[str, Any], chosen: Chosen, *, continued: bool
) -> list[Settings]:
    """The product of the dimensions, in rounds; `options` are the rest of the settings."""
    for name in ("nodes", "nproc_per_node"):
        if not dimensions[name] and (number := getattr(chosen, name)) is not None:
            dimensions[name] = (number,)
    left_open = not continued and not dimensions["nproc_per_node"] and options["device"] != "cpu"
    devices = len(visible_devices()) if left_open else 0
    fixed = {name: value for name, value in options.items() if name != "repeats" and value is not None}
    cells = product(dimensions, fixed, options["repeats"], devices=devices, shared=chosen.here)
    for cell in () if continued else cells:
        chosen.require_world(cell.nodes, cell.nproc_per_node)
    return cells


def _require_alone(context: click.Context) -> None:
    """Refuse options of cells beside --continue, which has them from the sweep."""
    for parameter in context.command.params:
        if parameter.name in {*OPTIONS, "repeats", "output"} and is_given(context, parameter.name):
            raise click.UsageError(
                f"{parameter.opts[0]} cannot be combined with --continue, which runs the sweep's cells unchanged"
            )


def _chosen_options(context: click.Context, dimensions: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """What the user chose, by the options' names; what was left at its default is in the cells."""
    chosen: dict[str, Any] = {}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in context.params or name in RESULTS:
            continue
        if source in (None, click.core.ParameterSource.DEFAULT):
            continue
        values = dimensions.get(name)
        chosen[parameter.opts[0].lstrip("-")] = list(values) if values else context.params[name]
    return chosen


def run_bench(request: Request, leader: Leader | None) -> int:
    """Run the cell, or the sweep's cells without a result, and show the results; returns the exit code.

    `leader` starts ranks that wait already.
    """
    interrupts = Interrupts()
    if request.single:
        display = Display()
        host = _host(request, leader, interrupts, display)
        results = run_single(request, host, _running(interrupts, display))
    else:
        sweep, folder = open_sweep(request)
        display = Display(cells=len(sweep.cells))
        host = _host(request, leader, interrupts, display)
        results = run_sweep(request, sweep, folder, host, _running(interrupts, display))
    if request.as_json:
        click.echo(printable_json(results.to_json()), nl=False)
    elif results.worth_a_table:
        display.table(results.records, results.baseline)
    to_stderr = request.as_json or not results.worth_a_table
    display.files(results.files, results.tracker, to_stderr=to_stderr)
    if results.again:
        display.warn(f"to run the failed cells again: {results.again}")
    return exit_code(results.records)


@contextmanager
def _running(interrupts: Interrupts, display: Display) -> Iterator[None]:
    with interrupts, display:
        yield


def _host(request: Request, leader: Leader | None, interrupts: Interrupts, display: Display) -> Host:
    return Host(
        launch=request.chosen.launch(interrupts, leader),
        interrupted=interrupts.check,
        interruptions=(Interrupted, KeyboardInterrupt),
        watch=display,
        memory=this_machine if request.chosen.here else None,
        max_restarts=request.max_restarts,
        unlimited=missing if request.chosen.name == "local" else lambda: _LIMITED,
    )
