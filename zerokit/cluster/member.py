"""A process that serves launches: it runs ranks here and sends home what they write, until the leader dismisses it.

python -P -m zerokit.cluster.member ADDRESS PORT NAME        a node, started by ssh or srun
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerokit.cluster.folders import Changes, temporary_folder
from zerokit.cluster.mail import LEADER, SILENCE_SECONDS, Mail, Peer, join_store
from zerokit.errors import ZerokitError
from zerokit.interrupts import Interrupted
from zerokit.launch.agents import GRACE_SECONDS, POLL_SECONDS, await_end, describe_room
from zerokit.launch.ranks import Ranks, World, describe_machine
from zerokit.network import free_port
from zerokit.versions import versions

_FILES_SECONDS = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NODE_GRACE_SECONDS = 30.0
"""In which ranks may save when a batch system ends their job; Slurm's own default (KillWait) is as much."""


def serve(leader: Peer, asked: list[str], check: Callable[[], None], grace: float = GRACE_SECONDS) -> int:
    """Serve launches until the leader dismisses this process. When it returns or raises, no rank is alive.

    Args:
        leader: who says what to run. It hears of every error that ends this process.
        asked: this process's command line, which the leader compares with its own.
        check: called often; raises `Interrupted` when this machine's user wants no more.
        grace: the seconds in which ranks may end by themselves after such an interruption.

    Returns the exit code that the leader gives. Raises `EOFError` if the leader is gone.
    """
    leader.say("hello", versions=versions(), port=free_port(""), asked=asked, **describe_machine())
    try:
        return _serve(leader, check, grace)
    except EOFError:
        raise
    except BaseException as error:
        known = isinstance(error, ZerokitError | Interrupted)
        leader.say("left", why=str(error) if known else f"{type(error).__name__}: {error}")
        raise


def _serve(leader: Peer, check: Callable[[], None], grace: float) -> int:
    while True:
        check()
        kind, content = leader.hear() or ("", {})
        if kind == "end":
            leader.say("bye")
            return int(content["code"])
        if kind != "start":  # it may also be a signal for ranks that have ended by themselves
            time.sleep(POLL_SECONDS)
            continue
        with temporary_folder() as folder:
            _run(leader, content, folder, check, grace)


def _run(
    leader: Peer, start: Mapping[str, Any], folder: Path, check: Callable[[], None], grace: float
) -> None:
    """Run this process's ranks of a launch to their end, in a copy of its folder."""
    changes = Changes(folder, start["files"])
    command = [word.replace(f"{start['folder']}/", f"{folder}/") for word in start["command"]]
    agent = Ranks(World(**start["world"]), range(*start["ranks"]), command, folder)

    def send(*, logs: bool) -> None:
        for file in changes.take(logs=logs):
            leader.say("file", launch=start["launch"], file=file)

    interrupted: Interrupted | None = None
    try:
        looked = time.monotonic()
        while agent.poll() is None:
            check()
            if (message := leader.hear()) is not None and message[0] == "signal":
                agent.send_signal(int(message[1]["number"]))
            if time.monotonic() - looked > _FILES_SECONDS:
                send(logs=bool(start["follow"]))
                looked = time.monotonic()
            time.sleep(POLL_SECONDS)
    except Interrupted as error:
        interrupted = error
        agent.send_signal(error.signal_number)
        await_end([agent], grace)
    finally:
        agent.end()
    send(logs=True)
    code, failures = agent.poll(), [asdict(one) for one in agent.failures]
    if interrupted is None or code == 0:
        note = describe_room(folder) if code else None
        leader.say("exit", launch=start["launch"], code=code, failures=failures, note=note)
    if interrupted is not None:
        raise interrupted


def main(address: str, port: str, name: str) -> int:
    """Serve the launches of whoever started this node."""
    for number in _SIGNALS:
        signal.signal(number, _leave)
    try:
        # The store is there already.
        with Mail(join_store(address, int(port)), name, [LEADER], SILENCE_SECONDS) as mail:
            return serve(mail.peers[LEADER], [], lambda: None, _NODE_GRACE_SECONDS)
    except EOFError:
        if not mail.peers[LEADER].met:
            print(f"the launcher cannot be reached at {address}:{port}: {mail.trouble}", file=sys.stderr)
    except (Interrupted, ZerokitError, OSError):
        pass  # the leader has been told
    return 1


def _leave(received: int, _: object) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise Interrupted(received)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # at once: the thread of the mail may wait for a store that does not respond
