"""A user's own workload, `--model package.module:factory`: the factory takes nothing and returns an `Own`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zerokit.bench.record.metrics import UNITS
from zerokit.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Own:
    """A user's workload: the model, its batches, and what throughput counts.

    Attributes:
        build: makes the model, whose `forward(*batch)` returns the loss, a scalar; called on every rank with torch's
            random numbers seeded, so that all have the same weights.
        batch: makes a micro-batch of a number of samples on the CPU, with random numbers from the generator it is
            given and from nowhere else: its seed is that of the micro-batch's first sample, counted over all ranks
            and steps of the job.
        unit: what throughput counts.
        units_per_sample: how many of these a sample has.
        init_fn: initialises one module of a model on meta in place, with the weights that `build` would give it.
            Without it the model is built whole on every rank.
        count: of how many things the loss of a micro-batch is the mean, such as samples, or tokens without padding,
            from the tensors of the micro-batch. For `--pace`, whose ranks have micro-batches of different sizes.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], tuple[Tensor, ...]]
    unit: Literal["tokens", "images", "samples"] = "samples"
    units_per_sample: int = 1
    init_fn: Callable[[nn.Module], None] | None = None
    count: Callable[..., int | Tensor] | None = None

    def __post_init__(self) -> None:
        number: object = self.units_per_sample
        if self.unit not in UNITS or not isinstance(number, int) or number < 1:
            raise UsageError(
                f"unit {self.unit!r}, {self.units_per_sample} of them a sample: expected {', '.join(UNITS)}, and a "
                "whole number above 0"
            )


def find(name: str) -> None:
    """Raise `UsageError` unless the module of `module:factory` exists; it is not run."""
    parts = name.partition(":")[0].split(".")
    folders: list[str] | None = [*sys.path, str(Path.cwd())]
    for count in range(1, len(parts) + 1):
        module = ".".join(parts[:count])
        spec = None if folders is None else PathFinder.find_spec(module, folders)
        if spec is None:
            raise UsageError(
                f"model {name!r}: no module {module!r} here or on the Python path; "
                "start in its folder, install it, or set PYTHONPATH"
            )
        inside = spec.submodule_search_locations
        folders = None if inside is None else list(inside)


def resolve(name: str) -> Own:
    """Import the module of `module:factory` and call the factory; raises `UsageError` if either fails."""
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    find(name)
    try:
        factory: object = importlib.import_module(module)
    except Exception as error:  # whatever the user's module does at import
        raise UsageError(
            f"model {name!r}: importing {module} failed: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise UsageError(f"model {name!r}: {module} has no {attribute}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise UsageError(f"model {name!r}: {attribute} is a {type(factory).__name__}, not a function")
    try:
        made = factory()
    except Exception as error:  # whatever the user's factory does
        raise UsageError(f"model {name!r}: {attribute}() failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, Own):
        raise UsageError(
            f"model {name!r}: {attribute}() returned a {type(made).__name__}: expected a workload, "
            "zerokit.bench.workloads.own.Own(build=<makes the model>, batch=<makes a micro-batch>)"
        )
    return made
