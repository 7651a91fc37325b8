"""One of the processes that somebody else has started, for the tests of `zerokit.cluster.joined`.

python -m tests.cluster.member FOLDER WHAT TIMES
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.launch.ranks import WORKLOAD
from zerokit import versions
from zerokit.cluster import joined, mail
from zerokit.cluster.membership import find_membership
from zerokit.interrupts import Interrupts
from zerokit.launch import agents, processes


def be_member(folder: str, what: str, times: str) -> None:
    """The leader launches as often as it is told; both have little patience. Ends this process."""
    mail.SILENCE_SECONDS, mail.HEARTBEAT_SECONDS = 4.0 if what == "wait" else 60.0, 0.25
    mail._STUCK_SECONDS = 2.0
    agents.PEERS_FOLLOW_SECONDS, processes.STOPPED_SECONDS = 0.5, 2.0
    asked = [os.environ.get("ASKED", "bench")]
    if "PACKAGE" in os.environ:
        versions._PACKAGE = Path(os.environ["PACKAGE"])
    found = find_membership(os.environ)
    assert found is not None
    with Interrupts() as interrupts:
        if not found.leads:
            sys.exit(joined.follow(found, asked, interrupts))
        with joined.lead(found, asked, interrupts) as leader:
            for number in range(int(times)):
                log_dir = Path(folder, "logs", str(number))
                log_dir.mkdir()
                (log_dir / "job").write_text("work")
                leader.launch(
                    WORKLOAD,
                    [folder, what, str(log_dir / "job")],
                    nodes=found.nodes,
                    nproc_per_node=found.nproc_per_node,
                    log_dir=log_dir,
                    interrupts=interrupts,
                )
            leader.code = 3
    sys.exit(leader.code)


if __name__ == "__main__":
    be_member(*sys.argv[1:])
