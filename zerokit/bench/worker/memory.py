"""Copies of a bench's training state in the nodes' memory, beside its checkpoints: an elastic one resumes from them.

The launcher names the directory by the job's random identity, so that ranks which are started anew find it, and no
other job does. What a killed job leaves there stays for them; a job that has trained all its steps removes it.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from zerokit.bench.machine.accelerator import gather
from zerokit.bench.record.measured import NodeCopies
from zerokit.bench.record.settings import Settings
from zerokit.errors import CheckpointError, ZerokitWarning

if TYPE_CHECKING:
    from zerokit.runtime import ZeroOptimizer

MARK = "copied"
"""A member of `extra` that only copies have."""
_MOST_NOTES = 5


class Memory:
    """The copies of one job on this rank; all ranks make the same calls.

    Args:
        directory: of each node's own; it need not be there.
        settings: how many copies, and how often.
        optimizer: whose state is copied.
        notes: gets what copies have warned of.
    """

    def __init__(
        self, directory: Path, settings: Settings, optimizer: ZeroOptimizer, notes: list[str]
    ) -> None:
        self.directory = directory
        self._settings, self._optimizer, self._notes = settings, optimizer, notes
        self._extra: Mapping[str, Any] = {}
        self._begun = 0
        self._held_ms: list[float] = []
        self._seconds: dict[int, float] = {}
        """By the step of a copy that is complete."""

    def begin(self, step: int) -> None:
        """Steps up to this one were made before."""
        from zerokit.checkpoint.nodes.copies import Copies

        settings = self._settings
        assert settings.copies is not None
        self._copies = Copies(
            self._optimizer,
            self.directory,
            copies=settings.copies,
            every=settings.copy_every,
            extra=self._begins,
            step=step,
        )
        # The losses of a step are in the journal before it is copied, so `after_step` comes from here.
        self._copies.stop()
        self._begun = step

    def due(self, step: int) -> bool:
        """Whether a copy is due after this step, or still waits for the one before."""
        return step // self._settings.copy_every > self._begun // self._settings.copy_every

    def after_step(self, step: int, extra: Mapping[str, Any]) -> None:
        """Begin a copy, if no save is under way. Called for all steps at which one is `due`."""
        self._extra, started, begun = extra, time.perf_counter(), self._begun
        with noted(self._notes):
            while self._copies.step < step:
                self._copies.after_step()
        self._note()
        if self._begun != begun:
            self._held_ms.append((time.perf_counter() - started) * 1000.0)

    def finish(self) -> NodeCopies | None:
        """Wait for the last copy, and remove all that the job has copied; what there was, None without any copy."""
        path = None
        try:
            path = self._copies.wait()
        except CheckpointError as error:
            self._notes.append(str(error))
        self._note()
        held = dict(sorted(one for one in gather(_held(path)) if one is not None))
        if os.environ["LOCAL_RANK"] == "0":
            remove(self.directory)
        if not self._seconds:
            return None
        return NodeCopies(
            count=len(self._seconds),
            step=max(self._seconds),
            held_ms=median(self._held_ms),
            ms=1000.0 * median(self._seconds.values()),
            node_bytes=list(held.values()),
        )

    def _begins(self, step: int) -> dict[str, Any]:
        self._begun = step
        return {**self._extra, MARK: True}

    def _note(self) -> None:
        if self._copies.saved is not None and self._copies.seconds is not None:
            self._seconds[self._copies.saved] = self._copies.seconds


@contextmanager
def noted(notes: list[str]) -> Iterator[None]:
    """Warnings of zerokit's become notes: those of ranks are in logs that nobody reads where all goes well."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for one in caught:
        if not issubclass(one.category, ZerokitWarning):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        elif len(notes) < _MOST_NOTES and str(one.message) not in notes:
            notes.append(str(one.message))


def _held(step: Path | None) -> tuple[int, int] | None:
    """This rank's node, as the step's record numbers it, and the bytes of its files."""
    from zerokit.checkpoint.nodes.record import read_record

    if step is None:
        return None
    with suppress(CheckpointError, OSError):
        if (record := read_record(step)) is not None:
            return record.node, sum(file.stat().st_size for file in step.iterdir())
    return None


def remove(directory: Path) -> None:
    """Remove a job's directory, unless it is somebody else's; a simulated node may have done it already."""
    from zerokit.checkpoint.nodes.members import require_private

    with suppress(CheckpointError, OSError):
        require_private(directory)
        shutil.rmtree(directory, ignore_errors=True)
