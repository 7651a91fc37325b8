"""Refusals in the words of a reader: what is expected of a file, and errors in data of another shape."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerokit.errors import CheckpointError

_UNEXPECTED = (
    *(LookupError, TypeError, ValueError, AttributeError),
    *(ArithmeticError, RecursionError, struct.error),
)
"""What other data than a reader expects leads to."""


def require(right: object, where: Path, fault: str) -> None:
    """Raise `CheckpointError`, that `where` has the fault, unless something is right."""
    if not right:
        raise CheckpointError(f"{where}: {fault}")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors in unexpected data to `CheckpointError`, naming `path`."""
    try:
        yield
    except _UNEXPECTED as error:
        kind = type(error).__name__
        raise CheckpointError(f"{path}: not in its framework's format: {kind}: {error}") from error
