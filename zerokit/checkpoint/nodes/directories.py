"""The directories that a command was given: what they are called, what they have, and their files on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from zerokit.checkpoint.nodes.complete import Holding
from zerokit.checkpoint.nodes.scan import scan
from zerokit.checkpoint.run import island_runs, require_directory
from zerokit.errors import CheckpointError

Report = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, often, in the caller's thread; what it raises ends the work."""


@dataclass
class Directory:
    """A run's or a step's directory on this machine. `shown` is what the user calls it."""

    shown: str
    path: Path
    distant: ClassVar[bool] = False
    """Whether files are brought here only when they are wanted."""

    def look(self, holder: int) -> list[Holding]:
        """What it has of steps. Raises `CheckpointError` where there is no directory, or one with islands' runs."""
        require_directory(self.path)
        if island_runs(self.path):
            raise CheckpointError(f"{self.path}: holds the runs of islands: give one of them")
        return scan(self.path, holder=holder)

    def fetch(self, files: Sequence[Path], report: Report | None) -> None:
        """Bring these files of the directory to their paths here."""

    def drop(self, files: Sequence[Path]) -> None:
        """Make room for others: these files of another machine are no longer wanted here."""

    def named(self, text: str) -> str:
        """A message, with the directory's name for its path here."""
        return text

    def rename(self, holding: Holding) -> Holding:
        """A holding whose messages are the user's; its `place` is still the path here."""
        return replace(holding, damaged=self.named(holding.damaged), note=self.named(holding.note))
