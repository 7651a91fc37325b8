"""The user's own workload: `--model package.module:factory`.

The factory takes nothing and returns an `Own`. For example, in `mine.py`:

    from zerokit.bench.workloads.own import Own

    def tiny() -> Own:
        return Own(build=Net, batch=lambda generator, size: (torch.randn(size, 8, generator=generator),))

and `zerokit bench --model mine:tiny`, in the folder of `mine.py` or wherever it can be imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zerokit.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Own:
    """A workload that zerokit does not know.

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
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], tuple[Tensor, ...]]
    unit: Literal["tokens", "images", "samples"] = "samples"
    units_per_sample: int = 1
    init_fn: Callable[[nn.Module], None] | None = None


def find(name: str) -> None:
    """Raise `UsageError` unless the module of `module:factory` can be found; nothing of it is run."""
    module = name.partition(":")[0]
    places: list[str] | None = [str(Path.cwd()), *sys.path]
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        found = None if places is None else PathFinder.find_spec(".".join(parts[:count]), places)
        if found is None:
            raise UsageError(
                f"model {name!r}: no module {'.'.join(parts[:count])!r} here or on the Python path; "
                "start in its folder, install it, or set PYTHONPATH"
            )
        locations = found.submodule_search_locations
        places = None if locations is None else list(locations)


def resolve(name: str) -> Own:
    """Import the module of `module:factory` and call the factory; raises `UsageError` saying which of these failed."""
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    find(name)
    try:
        found: object = importlib.import_module(module)
    except Exception as error:  # whatever the user's module does at import
        raise UsageError(
            f"model {name!r}: importing {module} failed: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"model {name!r}: {module} has no {attribute}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"model {name!r}: {attribute} is a {type(found).__name__}, not a function")
    try:
        made = found()
    except Exception as error:  # whatever the user's factory does
        raise UsageError(f"model {name!r}: {attribute}() failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, Own):
        raise UsageError(
            f"model {name!r}: {attribute}() returned a {type(made).__name__}, not a zerokit.bench.workloads.own.Own"
        )
    return made
