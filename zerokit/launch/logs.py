"""The ranks' output, shown while they run: their log files as they grow."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from zerokit.text import as_seen

_REDRAWN_SECONDS = 5.0
"""How often a line that is drawn again and again, as a progress bar is, is shown."""


class RankLogs:
    """Follows the logs below a launch's folder; `show` takes each line, with its rank, and "stdout" or "stderr"."""

    def __init__(self, folder: Path, show: Callable[[str, str], None]) -> None:
        self._folder, self._show = folder, show
        self._read: dict[Path, int] = {}
        self._redrawn: dict[Path, float] = {}

    def look(self, *, last: bool = False) -> None:
        """Show new output; a line waits for its end, unless this is the `last` time, or it is a progress bar."""
        for path in sorted(self._folder.glob("rank-*/std*.log")):
            size, start = path.stat().st_size, self._read.get(path, 0)
            if size <= start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                *lines, rest = file.read(size - start).split(b"\n")
            # What was drawn before is not read again; the last character may be half of a line's end.
            drawn = rest.rfind(b"\r", 0, -1) + 1
            self._read[path] = size - len(rest) + drawn
            now, bar = time.monotonic(), drawn > 0
            if rest and (last or (bar and now >= self._redrawn.get(path, 0.0) + _REDRAWN_SECONDS)):
                lines.append(rest)
                self._redrawn[path] = now
            rank = path.parent.name.removeprefix("rank-")
            for line in lines:
                text = as_seen(line.decode(errors="replace"))
                if text.strip() or b"\r" not in line:
                    self._show(f"rank {rank}: {text}", path.stem)
