"""The ranks' output, shown while they run: torchrun's log files as they grow."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_RANK = re.compile(r".*/node-(?P<node>\d+)/.*/(?P<local>\d+)/std(?:out|err)\.log")
"""torchrun's name of a rank's file, in the folder of its node."""


class RankLogs:
    """Follows the logs below a launch's folder.

    Args:
        folder: of the launch.
        nproc_per_node: ranks of each node.
        show: takes each complete line, with the rank that printed it.
    """

    def __init__(self, folder: Path, nproc_per_node: int, show: Callable[[str], None]) -> None:
        self._folder, self._ranks, self._show = folder, nproc_per_node, show
        self._read: dict[Path, int] = {}

    def look(self) -> None:
        """Show new output; an unfinished last line waits for its end."""
        for path in sorted(self._folder.rglob("std*.log")):
            match = _RANK.fullmatch(path.as_posix())
            size, start = path.stat().st_size, self._read.get(path, 0)
            if match is None or size <= start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                whole, newline, _ = file.read(size - start).rpartition(b"\n")
            self._read[path] = start + len(whole) + len(newline)
            rank = int(match["node"]) * self._ranks + int(match["local"])
            for line in whole.decode(errors="replace").split("\n") if newline else ():
                self._show(f"rank {rank}: {line}")
