"""Refusals in the words of a reader: what is expected of a file."""

from __future__ import annotations

from pathlib import Path

from zerokit.errors import CheckpointError


def require(right: object, where: Path, fault: str) -> None:
    """Raise `CheckpointError`, that `where` has the fault, unless something is right."""
    if not right:
        raise CheckpointError(f"{where}: {fault}")
