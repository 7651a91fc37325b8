"""The launcher's side of a launch: agents, each with some ranks here or elsewhere, until all have ended.

Invariant: when `conduct` has raised or returned, nothing that the agents started is alive.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Protocol

from zerokit.interrupts import Interrupted, Interrupts
from zerokit.launch.failures import Failure, WorkerFailed, explain_failures
from zerokit.patience import Patience

POLL_SECONDS = 0.05
# A rank whose peer has died fails by itself within moments (its sockets close), and reports why.
PEERS_FOLLOW_SECONDS = 3.0
# How long a bench's ranks may take to end after SIGTERM or SIGINT before they are killed.
GRACE_SECONDS = 5.0
# A disk with less room is one on which a rank may have failed to write its log.
_LEAST_FREE = 64 * 2**10
DISK_HAS = "the disk of its log has"


class Agent(Protocol):
    """Some ranks of a launch. Their output is in the launch's folder once they have ended."""

    failures: list[Failure]
    """How its ranks failed; filled once it has ended."""
    trouble: str | None
    """Why it failed, if no rank was the cause."""
    note: str | None
    """What may be the cause on its machine, if that is another."""

    @property
    def mute(self) -> bool:
        """Whether nothing is heard of it for now."""

    def poll(self) -> int | None:
        """0 when all its ranks have ended well, another number when one has failed; None while they run."""

    def send_signal(self, number: int) -> None:
        """Send the ranks this signal."""

    def end(self) -> None:
        """End what is left."""


def conduct(
    agents: Sequence[Agent],
    logs: Path,
    interrupts: Interrupts,
    poll: Callable[[], None],
    grace: float = GRACE_SECONDS,
) -> None:
    """Wait until all agents have ended, or one has failed and the others had time to end; then end what is left.

    After a signal ranks have `grace` seconds to end by themselves.

    Raises:
        WorkerFailed: one has failed.
        Interrupted: a signal came; it was passed on.
    """
    try:
        _attend(agents, interrupts, poll)
        if failed := [agent for agent in agents if agent.poll() != 0]:
            interrupts.check()  # a batch system ends ranks and launcher alike
            raise _explain(failed, logs)
    except Interrupted as error:
        for agent in agents:
            agent.send_signal(error.signal_number)
        await_end(agents, grace)
        raise
    finally:
        end_all(agents)


def _attend(agents: Sequence[Agent], interrupts: Interrupts, poll: Callable[[], None]) -> None:
    patience: Patience | None = None
    while running(agents):
        interrupts.check()
        poll()
        if patience is None and any(agent.poll() for agent in agents):
            patience = Patience(PEERS_FOLLOW_SECONDS)
        mute = [agent for agent in running(agents) if agent.mute]  # it may be lost, and then the cause
        if patience is not None and patience.over and not mute:
            return
        time.sleep(POLL_SECONDS)
    poll()


def running(agents: Sequence[Agent]) -> list[Agent]:
    """The agents that have not ended."""
    return [agent for agent in agents if agent.poll() is None]


def await_end(agents: Sequence[Agent], seconds: float) -> None:
    """Wait until all agents have ended, up to a time limit."""
    patience = Patience(seconds)
    while running(agents) and not patience.over:
        time.sleep(POLL_SECONDS)


def end_all(agents: Sequence[Agent]) -> None:
    """End them at the same time."""
    enders = [Thread(target=agent.end) for agent in agents]
    for ender in enders:
        ender.start()
    for ender in enders:
        ender.join()


def _explain(failed: Sequence[Agent], logs: Path) -> WorkerFailed:
    """The error for a launch in which these agents failed."""
    failures = sorted((one for agent in failed for one in agent.failures), key=lambda one: one.cause_order)
    trouble = next(filter(None, (agent.trouble for agent in failed)), None)
    lines = explain_failures(failures, logs) if trouble is None else [trouble]
    lines += filter(None, (describe_room(logs), *(agent.note for agent in failed)))
    return WorkerFailed("\n".join([*lines, f"logs: {logs}"]), failures)


def describe_room(logs: Path) -> str | None:
    """What to do where the disk of these logs is full."""
    if (free := shutil.disk_usage(logs).free) >= _LEAST_FREE:
        return None
    return f"{DISK_HAS} {free} bytes left: make room, or set TMPDIR to another"
