"""The node program with less patience. Its one rank is no torchrun agent's: that would first import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerokit.launch import frames, node, processes


def start_rank(start: Mapping[str, Any], folder: Path, launch_id: str) -> subprocess.Popen[bytes]:
    """In place of the agent."""
    (folder / f"node-{start['node']}").mkdir()
    here = {"RANK": str(start["node"]), "ZEROKIT_AGENT_PID": str(os.getpid())}
    arguments = frames.relocate(start["arguments"], start["folder"], folder)
    return subprocess.Popen(
        [sys.executable, "-m", "zerokit.launch.rank", start["module"], *arguments],
        env=node._variables(start, launch_id) | here,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


if __name__ == "__main__":
    frames.SILENCE_SECONDS = 5.0
    processes.STOPPED_SECONDS = 2.0
    node._start_agent = start_rank
    os._exit(node.main())
