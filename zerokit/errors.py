"""The exceptions of zerokit: one small tree, so that callers can catch all errors or one kind."""

from __future__ import annotations

from typing import ClassVar


class ZerokitError(Exception):
    """Base of every error that zerokit raises on purpose.

    `several_lines`: the message has line breaks of its own; in any other, a line break can only come from a file.
    """

    several_lines: ClassVar[bool] = False


class UsageError(ZerokitError, ValueError):
    """The caller's arguments are invalid or contradict each other."""


class LayoutMismatch(ZerokitError):
    """Ranks (or a model and what is loaded into it) disagree about parameters, units or settings."""


class UnsupportedOptimizer(ZerokitError, TypeError):
    """The optimizer's update of an element depends on other elements, so it cannot be sharded flat."""


class ScheduleError(ZerokitError, RuntimeError):
    """Ranks' collectives do not match: a rank failed, stopped, or took another path through the model.

    End the process then: with NCCL `destroy_process_group()` would first wait for the ranks that are gone, until
    torch's watchdog aborts.
    """


class NonFiniteError(ZerokitError, RuntimeError):
    """Gradients are inf or nan, and the caller asked for an error then."""


class LossScaleError(ZerokitError, FloatingPointError):
    """fp16 gradients overflow although the loss scale has reached its floor."""


class ZerokitWarning(UserWarning):
    """Something unexpected that is not an error; the commands print it on stderr."""


class CheckpointError(ZerokitError):
    """A checkpoint cannot be written, or what was read is damaged, incomplete or of another kind than expected."""


class MissingPath(CheckpointError, UsageError):
    """A checkpoint's path, or the parent of an output's, does not exist; commands exit with 2, as for wrong usage."""


class StorageError(CheckpointError):
    """The operating system refused to read or write a checkpoint's file, which says nothing about the file's bytes."""


def root_of(error: BaseException) -> BaseException:
    """The innermost error, which libraries wrap up to five times."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return error
