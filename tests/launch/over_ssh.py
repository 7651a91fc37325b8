"""A launch of `workload` on two hosts over ssh, for the tests between hosts: it has no torch, so it costs little.

python -m tests.launch.over_ssh CONFIG PYTHON FOLDER WHAT
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.launch.ranks import WORKLOAD
from zerokit.launch import agents
from zerokit.launch.failures import LaunchError, WorkerFailed
from zerokit.launch.interrupts import Interrupted, Interrupts
from zerokit.launch.remote import launch_on
from zerokit.launch.ssh import Ssh


def launch(config: str, python: str, folder: str, what: str) -> int:
    """Its exit code, as the bench's; what failed is printed."""
    agents.PEERS_FOLLOW_SECONDS = 0.5
    options = ("-F", config, "-o", "ServerAliveInterval=2")
    ssh = Ssh(options, python, connect_seconds=20.0)
    logs = Path(folder, "logs")
    logs.mkdir()
    try:
        with Interrupts() as interrupts:
            launch_on(
                [ssh.remote("a"), ssh.remote("b")],
                WORKLOAD,
                [folder, what],
                nproc_per_node=1,
                log_dir=logs,
                interrupts=interrupts,
                master_addr=ssh.address("a"),
                connect_seconds=20.0,
            )
    except (LaunchError, WorkerFailed) as error:
        print(error)
        return 1
    except Interrupted as error:
        return 128 + error.signal_number
    return 0


if __name__ == "__main__":
    sys.exit(launch(*sys.argv[1:]))
