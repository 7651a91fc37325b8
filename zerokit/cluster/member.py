"""A process that serves launches: it runs ranks here and sends home what they write, until the leader dismisses it.

python -P -m zerokit.cluster.member ADDRESS PORT NAME        a node, started by ssh or srun
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerokit.cluster.folders import Changes
from zerokit.cluster.mail import LEADER, SILENCE_SECONDS, Mail, Peer, join_store
from zerokit.launch.agents import POLL_SECONDS, await_end
from zerokit.launch.ranks import Ranks, World, describe_machine
from zerokit.network import free_port
from zerokit.versions import versions

_FILES_SECONDS = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_GRACE_SECONDS = 30.0
"""In which ranks may save when a batch system ends their job; Slurm's own default (KillWait) is as much."""


class _Signalled(EOFError):
    """This process was told to end."""


def serve(leader: Peer, asked: list[str], check: Callable[[], None]) -> int:
    """Serve launches; returns the exit code with which the leader dismisses this process.

    `asked` is what this process was asked for, which the leader compares. `check` raises if this machine's user wants
    no more. Raises `EOFError` if the leader is gone. No rank is alive afterwards.
    """
    leader.say("hello", versions=versions(), port=free_port(""), asked=asked, **describe_machine())
    while True:
        check()
        kind, content = leader.hear() or ("", {})
        if kind == "end":
            leader.say("bye")
            return int(content["code"])
        if kind != "start":  # it may also be a signal for ranks that have ended by themselves
            time.sleep(POLL_SECONDS)
            continue
        folder = Path(tempfile.mkdtemp(prefix="zerokit-member-"))
        try:
            _run(leader, content, folder, check)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _run(leader: Peer, start: Mapping[str, Any], folder: Path, check: Callable[[], None]) -> None:
    """Run this process's ranks of a launch to their end, in a copy of its folder."""
    changes = Changes(folder, start["files"])
    command = [word.replace(f"{start['folder']}/", f"{folder}/") for word in start["command"]]
    agent = Ranks(World(**start["world"]), range(*start["ranks"]), command, folder)

    def send(*, logs: bool) -> None:
        for file in changes.take(logs=logs):
            leader.say("file", launch=start["launch"], file=file)

    signalled: _Signalled | None = None
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
    except _Signalled as error:
        signalled = error
        agent.send_signal(signal.SIGTERM)
        await_end([agent], _GRACE_SECONDS)
    finally:
        agent.end()
    send(logs=True)
    code, failures = agent.poll(), [asdict(one) for one in agent.failures]
    leader.say("exit", launch=start["launch"], code=code, failures=failures)
    if signalled is not None:
        raise signalled


def main(address: str, port: str, name: str) -> int:
    """Serve the launches of whoever started this node."""
    for number in _SIGNALS:
        signal.signal(number, _leave)
    try:
        with Mail(
            join_store(address, int(port)), name, [LEADER], SILENCE_SECONDS
        ) as mail:  # it is there already
            return serve(mail.peers[LEADER], [], lambda: None)
    except EOFError:
        if not mail.peers[LEADER].met:
            print(f"the launcher cannot be reached at {address}:{port}: {mail.trouble}", file=sys.stderr)
        return 1


def _leave(*_: object) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise _Signalled


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # at once: the thread of the mail may wait for a store that does not respond
