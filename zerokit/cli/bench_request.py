"""The request of `zerokit bench`: its checked options as one value."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from zerokit.bench.machine.devices import visible_devices
from zerokit.bench.record.settings import (
    CHECKPOINTS,
    DEFAULT_REPEATS,
    DIMENSIONS,
    OPTIONS,
    STEPS_A_ROUND,
    Settings,
)
from zerokit.bench.run.sweep import product
from zerokit.bench.tracking.store import Tracking, resolve_uri
from zerokit.cli.bench_options import RESULTS
from zerokit.cli.launcher_options import take_options
from zerokit.cli.launchers import Chosen, choose_launcher, given_arguments, is_given
from zerokit.errors import UsageError
from zerokit.text import without_secrets

_CHECKPOINTS = [name for name, how in OPTIONS.items() if how.heading == CHECKPOINTS]
"""Settings for a single bench: cells that write the same checkpoints would continue each other's."""


@dataclass(frozen=True)
class Request:
    """The cells to run, and the places for their results.

    Attributes:
        chosen: who starts the ranks.
        cells: in the order of running; those of a sweep that goes on are in its folder.
        options: what the user chose, by the options' names.
        output: for the record or the sweep.
        continued: the folder of the sweep to go on with.
        tracking: MLflow; None without it.
        as_json: whether stdout is for a program.
        max_restarts: of an elastic bench whose ranks are started here.
        given: options of MLflow as given on the command line, for advice that repeats it.
    """

    chosen: Chosen
    cells: Sequence[Settings]
    options: dict[str, Any]
    output: Path | None
    continued: Path | None
    tracking: Tracking | None
    as_json: bool
    max_restarts: int
    given: str

    @property
    def single(self) -> bool:
        """Whether one cell runs once, without a sweep's folder."""
        return self.continued is None and len(self.cells) == 1


def parse(context: click.Context, options: dict[str, Any]) -> Request:
    """Parse the command line's options; raises `click.UsageError` if they contradict each other."""
    output, continued, as_json, tracking_uri, experiment, no_mlflow, max_restarts = (
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
    return Request(
        chosen=chosen,
        cells=cells,
        options=_chosen_options(context, dimensions),
        output=output,
        continued=continued,
        tracking=None if no_mlflow else Tracking(resolve_uri(tracking_uri), experiment),
        as_json=as_json,
        max_restarts=max_restarts if chosen.name == "local" else 0,
        given="".join(
            f" {shlex.quote(without_secrets(word))}"
            for word in given_arguments(context, only=("tracking_uri", "experiment", "no_mlflow"))
        ),
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
    once = product(dimensions, fixed, devices=devices, shared=chosen.here)
    repeats = options["repeats"] or (DEFAULT_REPEATS if len(once) > 1 else 1)
    if repeats > 1:
        fixed.setdefault("steps", STEPS_A_ROUND)
    cells = product(dimensions, fixed, repeats, devices=devices, shared=chosen.here)
    if chosen.member is not None and not continued:
        for cell in cells:
            chosen.member.require_world(cell.nodes, cell.nproc_per_node)
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
