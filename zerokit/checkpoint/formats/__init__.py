"""Checkpoints of other frameworks, read and written without them: DeepSpeed, DCP (FSDP2), Hugging Face folders, `.pt`.

`pickles` and `torchfile` read what `torch.save` wrote; `deepspeed`, `dcp`, `huggingface` and `statedict` say which
bytes of it are which elements of which parameter; `foreign` holds that as a `Source`, which everything that reads
checkpoints takes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from zerokit.checkpoint.disk import explained, is_there
from zerokit.checkpoint.formats import dcp, deepspeed, huggingface, statedict
from zerokit.checkpoint.nodes.remote import host_and_path
from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.source import Source
from zerokit.errors import CheckpointError, UsageError
from zerokit.files import path_of

T = TypeVar("T")

FORMATS = ("zerokit", "deepspeed", "dcp", "huggingface")
"""What can be written; files of `torch.save` are only read."""

WEIGHTS_ALONE = ("huggingface", statedict.FORMAT)
"""Formats without an optimizer's state."""

_UNEXPECTED = (
    *(LookupError, TypeError, ValueError, AttributeError),
    *(ArithmeticError, RecursionError, struct.error),
)
"""What other data than a reader expects leads to."""

_READERS: tuple[tuple[Callable[[Path], bool], Callable[[Path], Source]], ...] = (
    (deepspeed.recognises, deepspeed.read),
    (dcp.recognises, dcp.read),
    (huggingface.recognises, huggingface.read),
    (statedict.recognises, statedict.read),
)


def open_source(path: str | os.PathLike[str], *, whole: bool = False) -> Source:
    """Open the checkpoint at `path`, in any format.

    Args:
        path: the directory of a step or a run, of a DeepSpeed checkpoint or its tag, of a DCP checkpoint, a Hugging
            Face folder or file, or a file of `torch.save` with a state dict.
        whole: of a run of zerokit's, take the newest step that has an optimizer's state, too.

    Raises `CheckpointError` unless it holds a checkpoint that zerokit reads, and `UsageError` for `host:path`.
    """
    if host_and_path(path) is not None:
        raise UsageError(f"{path}: is on another machine: make a run of it here with zerokit gather")
    read = recognised(path)
    if read is None:
        return Checkpoint(path, whole=whole)
    try:
        return read(path_of(path))
    except _UNEXPECTED as error:
        kind = type(error).__name__
        raise CheckpointError(f"{path}: not in its framework's format: {kind}: {error}") from error


def of_newest(task: Callable[..., T], *paths: str | os.PathLike[str]) -> T:
    """What `task` returns for the checkpoints at `paths`; from newer steps where a save beside it removes one."""
    while True:
        sources = [open_source(path) for path in paths]
        try:
            return task(*sources)
        except CheckpointError:
            if not any(source.run is not None and not is_there(source.path) for source in sources):
                raise


def recognised(path: str | os.PathLike[str]) -> Callable[[Path], Source] | None:
    """The reader of the checkpoint at `path`, if another framework wrote it; None otherwise."""
    found = path_of(path)
    with explained(found, "looked at"):
        return next((read for recognises, read in _READERS if recognises(found)), None)
