"""The node program with less patience; its files are those of PACKAGE, and its disk is full, if FULL is set."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from zerokit import versions
from zerokit.cluster import mail, member
from zerokit.launch import agents, processes

if __name__ == "__main__":
    agents.PEERS_FOLLOW_SECONDS, processes.STOPPED_SECONDS, mail.SILENCE_SECONDS = 0.5, 2.0, 5.0
    if "PACKAGE" in os.environ:
        versions._PACKAGE = Path(os.environ["PACKAGE"])
    if "FULL" in os.environ:
        agents._LEAST_FREE = 1 << 60
    os._exit(member.main(*sys.argv[1:]))
