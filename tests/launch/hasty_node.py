"""The node program with less patience. Its one rank is no torchrun agent's, which would first import torch, unless the
argument `agents` is given.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from zerokit.launch import frames, node, processes


def start_rank(start: Mapping[str, Any], folder: Path, launch_id: str) -> subprocess.Popen[bytes]:
    """In place of the agent."""
    logs = folder / f"node-{start['node']}" / "0" / "attempt_0" / "0"
    logs.mkdir(parents=True)
    here = {"RANK": str(start["node"]), "ZEROKIT_AGENT_PID": str(os.getpid())}
    arguments = frames.relocate(start["arguments"], start["folder"], folder)
    with (logs / "stdout.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "zerokit.launch.rank", start["module"], *arguments],
            env=node._variables(start, launch_id) | here,
            stdin=subprocess.DEVNULL,
            stdout=log,
            start_new_session=True,
        )


def start_hasty(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Torchrun's agent, and with it what it takes for a stopped rank."""
    at = words.index("zerokit.launch.agent")
    return subprocess.Popen([*words[:at], "tests.launch.hasty_node", *words[at:]], **options)


if __name__ == "__main__":
    processes.STOPPED_SECONDS = 2.0
    if sys.argv[1:2] == ["zerokit.launch.agent"]:
        del sys.argv[1]
        runpy.run_module("zerokit.launch.agent", run_name="__main__")
    frames.SILENCE_SECONDS = 5.0
    if sys.argv[1:] == ["agents"]:
        hasty = SimpleNamespace(**vars(subprocess) | {"Popen": start_hasty})
        mock.patch("zerokit.launch.node.subprocess", hasty).start()
    else:
        node._start_agent = start_rank
    os._exit(node.main())
