"""`list_steps`: the steps of a run, or those that all nodes have together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zerokit.checkpoint import run as runs
from zerokit.errors import UsageError

if TYPE_CHECKING:
    from zerokit.runtime import ZeroOptimizer


def list_steps(
    run_directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    optimizer: ZeroOptimizer | None = None,
) -> list[int]:
    """The steps of a run, ascending; empty if the directory is missing.

        if zerokit.list_steps("run"):
            extra = zerokit.load("run", optimizer)

    For islands (`zerokit.LocalSteps`), the steps that all of them have. Their files are not looked at.

    With an `optimizer` all ranks call it, with one directory or a list of places as `load` takes them: the steps whose
    files the ranks' nodes have together, of later places only newer ones. A node that was replaced has none of its own.

    Raises `CheckpointError` where the directory cannot be listed, or a step not looked at, and `UsageError` for a list
    without an optimizer.
    """
    if optimizer is None:
        if not isinstance(run_directory, str | os.PathLike):
            raise UsageError("list_steps() of several places: pass the optimizer, whose ranks look together")
        return runs.list_steps(run_directory)
    from zerokit.checkpoint.nodes.places import StepsOnNodes, places_of
    from zerokit.checkpoint.together import Together

    together = Together(optimizer.runtime.collectives)
    places = places_of(run_directory, together)
    if places is None:
        assert isinstance(run_directory, str | os.PathLike)
        return together.on_first(lambda: runs.list_steps(run_directory))
    return StepsOnNodes(places, together, whole=False).steps()
