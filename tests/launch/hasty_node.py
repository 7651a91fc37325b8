"""The node program with less patience."""

from __future__ import annotations

import os

from zerokit.launch import agents, frames, node, processes

if __name__ == "__main__":
    agents.PEERS_FOLLOW_SECONDS, processes.STOPPED_SECONDS, frames.SILENCE_SECONDS = 0.5, 2.0, 5.0
    os._exit(node.main())
