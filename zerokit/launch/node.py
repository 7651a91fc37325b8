"""One node of a remote launch: it identifies itself, runs its ranks, and sends their files back.

    python -P -m zerokit.launch.node        its messages are those of `frames`

It imports no torch itself, so that it answers at once. When its input closes it ends everything that it started.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from zerokit.launch.agents import POLL_SECONDS
from zerokit.launch.distant import hear, serve
from zerokit.launch.frames import Peer
from zerokit.launch.network import free_port
from zerokit.versions import versions

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Serve one launch; returns 0 if it was served to its end, even if ranks failed."""
    for number in _SIGNALS:
        signal.signal(number, _leave)
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other prints must not get between the frames
    peer = Peer(sys.stdin.buffer, outgoing)
    folder = Path(tempfile.mkdtemp(prefix="zerokit-node-"))
    try:
        peer.say("hello", versions=versions(), host=socket.gethostname(), pid=os.getpid(), port=free_port(""))
        while (message := hear(peer)) is None:
            time.sleep(POLL_SECONDS)
        kind, start = message
        if kind != "start":
            return 2
        serve(peer, start, range(*start["ranks"]), folder, lambda: None)
        peer.close()
        while not outgoing.closed:
            hear(peer)
            time.sleep(POLL_SECONDS)
    except EOFError:
        return 1  # the launcher is gone, or wants no more
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _leave(*_: object) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise EOFError


if __name__ == "__main__":
    # At once: the thread that reads may hold the lock of the standard input, which Python would wait for.
    os._exit(main())
