"""The node program with less patience; its files are those of PACKAGE, if that is set."""

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
    os._exit(member.main(*sys.argv[1:]))
