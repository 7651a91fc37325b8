"""The launcher's side of a launch: one agent per node, on any machine, until all have ended.

Invariant: when `attend` has raised or returned and `end_all` has run, nothing that the agents started is alive.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from zerokit.launch.failures import (
    WorkerFailed,
    explain_failures,
    name_node,
    read_failures,
    signal_name,
    tail,
)
from zerokit.launch.interrupts import Interrupts

POLL_SECONDS = 0.05
# A node whose peer has died fails by itself within moments (its sockets close), and reports why.
PEERS_FOLLOW_SECONDS = 3.0
# How long ranks may take to end after SIGTERM or SIGINT before they are killed.
GRACE_SECONDS = 5.0
# A disk with less room is one on which an agent may have failed to write its log.
_LEAST_FREE = 64 * 2**10


class Agent(Protocol):
    """An agent: a process that runs the ranks of one node."""

    node: int
    host: str | None
    """The machine, where it is not this one."""
    directory: Path
    """Has its report and its ranks' output, here, once it has ended."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def send_signal(self, number: int) -> None:
        """Ask the agent to end its ranks with this signal."""

    def trouble(self) -> str | None:
        """The reason why the agent itself failed, if no rank was the cause."""


def attend(agents: Sequence[Agent], interrupts: Interrupts, poll: Callable[[], None]) -> None:
    """Wait until all agents have ended, or one has failed and the others had time to end."""
    failed_at: float | None = None
    while running(agents):
        interrupts.check()
        poll()
        if failed_at is None and any(agent.poll() for agent in agents):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > PEERS_FOLLOW_SECONDS:
            return
        time.sleep(POLL_SECONDS)
    poll()


def running(agents: Sequence[Agent]) -> list[Agent]:
    """The agents that have not ended."""
    return [agent for agent in agents if agent.poll() is None]


def await_end(agents: Sequence[Agent], seconds: float) -> None:
    """Wait until all agents have ended, up to a time limit."""
    deadline = time.monotonic() + seconds
    while running(agents) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def pass_on(agents: Sequence[Agent], number: int) -> None:
    """End all agents' ranks with this signal, and give them time."""
    for agent in agents:
        agent.send_signal(number)
    await_end(agents, GRACE_SECONDS)


def explain(agents: Sequence[Agent], logs: Path) -> WorkerFailed:
    """The error for a launch in which some `agents` failed."""
    failed = [agent for agent in agents if agent.poll() != 0]
    failures = [one for agent in failed for one in read_failures(agent.directory, agent.node, agent.host)]
    broken = next((agent for agent in failed if (agent.poll() or 0) < 0 or agent.trouble()), None)
    if broken is None and failures:
        return explain_failures(failures, logs)
    agent = broken or failed[0]
    code = agent.poll() or 0
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
    message = agent.trouble() or f"{name_node(agent.node, agent.host)}: its torchrun agent {how}"
    lines = [message, tail(agent.directory / "agent.log"), _full_disk(logs), f"logs: {logs}"]
    return WorkerFailed(
        "\n".join(filter(None, lines)), failures, [one.node for one in failed if (one.poll() or 0) < 0]
    )


def _full_disk(logs: Path) -> str:
    """What an agent cannot write where it writes its log; empty where there is room."""
    free = shutil.disk_usage(logs).free
    return (
        "" if free >= _LEAST_FREE else f"its disk has {free} bytes left: make room, or set TMPDIR to another"
    )
