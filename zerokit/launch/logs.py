"""The ranks' output, shown while they run: their log files as they grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class RankLogs:
    """Follows the logs below a launch's folder; `show` takes each complete line, with the rank that printed it."""

    def __init__(self, folder: Path, show: Callable[[str], None]) -> None:
        self._folder, self._show = folder, show
        self._read: dict[Path, int] = {}

    def look(self) -> None:
        """Show new output; an unfinished last line waits for its end."""
        for path in sorted(self._folder.glob("rank-*/std*.log")):
            size, start = path.stat().st_size, self._read.get(path, 0)
            if size <= start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                whole, newline, _ = file.read(size - start).rpartition(b"\n")
            self._read[path] = start + len(whole) + len(newline)
            rank = path.parent.name.removeprefix("rank-")
            for line in whole.decode(errors="replace").split("\n") if newline else ():
                self._show(f"rank {rank}: {line}")
