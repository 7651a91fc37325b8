"""The ranks' output, shown while they run: their log files as they grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class RankLogs:
    """Follows the logs below a launch's folder; `show` takes each line, with its rank, and "stdout" or "stderr"."""

    def __init__(self, folder: Path, show: Callable[[str, str], None]) -> None:
        self._folder, self._show = folder, show
        self._read: dict[Path, int] = {}

    def look(self, *, last: bool = False) -> None:
        """Show new output; a line waits for its end, unless this is the `last` time."""
        for path in sorted(self._folder.glob("rank-*/std*.log")):
            size, start = path.stat().st_size, self._read.get(path, 0)
            if size <= start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                *lines, rest = file.read(size - start).split(b"\n")
            self._read[path] = size - len(rest)
            rank = path.parent.name.removeprefix("rank-")
            for line in [*lines, rest] if last and rest else lines:
                self._show(f"rank {rank}: {line.decode(errors='replace')}", path.stem)
