"""The progress of a bench: rank 0 appends one line per step to a file, and the launcher reads the new lines.

A file, because torchrun closes every pipe that its ranks might inherit. Lines are written between the timed
steps, never inside one; where the host runs ahead of a device, at most two a second.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress after `done` of `total` steps, warm-up included; the last step's loss and ms are None if unknown."""

    done: int
    total: int
    warmup: int
    loss: float | None
    step_ms: float | None


class ProgressWriter:
    """Writes progress on rank 0; without a path it writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a", encoding="utf-8")

    def write(self, progress: Progress) -> None:
        """Append one line."""
        if self._file is not None:
            line = [progress.done, progress.total, progress.warmup, progress.loss, progress.step_ms]
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class ProgressReader:
    """Reads progress in the launcher."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def latest(self) -> Progress | None:
        """The newest complete line since the last call, if any."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return None
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return Progress(*json.loads(whole.splitlines()[-1])) if whole else None
