r"""N nodes on this machine: one torchrun agent a node, static rendezvous over loopback.

    launch(...) -- agent (node 0) -- rank 0, rank 1
                \- agent (node 1) -- rank 2, rank 3

Invariant: when `launch` returns or raises, no process that it started is alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerokit.errors import ZerokitError
from zerokit.launch.interrupts import Interrupted, Interrupts
from zerokit.launch.processes import MARK, kill_marked

POLL_SECONDS = 0.05
# A node whose peer has died fails by itself within moments (its sockets close), and then says what it saw.
PEERS_FOLLOW_SECONDS = 3.0
# How long ranks may take to end after SIGTERM or SIGINT before they are killed.
GRACE_SECONDS = 5.0
PORT_ATTEMPTS = 5
TAIL_LINES = 20


class LaunchError(ZerokitError):
    """The ranks could not be started."""


class WorkerFailed(ZerokitError):
    """A rank ended with an error or by a signal; the message names it, and the end of its stderr.

    `failures` are all ranks' that are known, the cause first.
    """

    def __init__(self, message: str, failures: Sequence[Failure] = ()) -> None:
        self.failures = tuple(failures)
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended; `time` in seconds since the epoch, `stderr` is its log file."""

    rank: int
    node: int
    pid: int
    exit_code: int
    message: str
    expected: bool
    time: float
    stderr: Path | None

    @property
    def cause_order(self) -> tuple[bool, bool, float]:
        """Sorts the cause before its consequences.

        A killed rank is noticed up to a tenth of a second after its peers have failed for want of it. SIGTERM
        is how agents end the ranks beside one that failed.
        """
        killed = self.exit_code < 0 and self.exit_code != -signal.SIGTERM
        return (not killed, self.exit_code < 0, self.time)

    def describe(self) -> str:
        """One line: the rank, its node and process, how it ended."""
        where = f"rank {self.rank} (node {self.node}, pid {self.pid})"
        if self.exit_code >= 0:
            return f"{where} failed: {self.message or f'exit code {self.exit_code}'}"
        name = _signal_name(-self.exit_code)
        hint = ""
        if name == "SIGKILL":
            hint = " (if nobody did that: the kernel does when memory runs out, see dmesg)"
        return f"{where} was killed by {name}{hint}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(slots=True)
class _Agent:
    node: int
    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def report(self) -> Path:
        return self.directory / "report.json"


def free_port() -> int:
    """A TCP port of loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def threads_per_rank(ranks: int) -> int:
    """The cores this process may use, shared out; at least one each."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    return max(1, cores // ranks)


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    nodes: int,
    nproc_per_node: int,
    log_dir: Path,
    interrupts: Interrupts,
    environment: Mapping[str, str] | None = None,
    poll: Callable[[], None] = lambda: None,
    port: Callable[[], int] = free_port,
) -> None:
    """Run `python -m module arguments` on nodes × nproc_per_node ranks and wait for all of them.

    Args:
        module: what each rank runs; it finds the torchrun environment.
        arguments: its command line.
        nodes: torchrun agents to start.
        nproc_per_node: ranks of each.
        log_dir: an existing directory; each rank's output goes below it.
        interrupts: looked at while waiting.
        environment: variables set for every rank, beside those of this process.
        poll: called about twenty times a second while the ranks run.
        port: names the rendezvous port; asked again when the port is taken.

    Raises:
        WorkerFailed: a rank failed or was killed.
        LaunchError: the agents could not start.
        Interrupted: SIGINT or SIGTERM came; it was passed on.
    """
    for attempt in range(PORT_ATTEMPTS):
        directory = log_dir / f"attempt-{attempt}"
        if _attempt(
            [module, *arguments],
            nodes=nodes,
            nproc_per_node=nproc_per_node,
            directory=directory,
            interrupts=interrupts,
            environment=environment or {},
            poll=poll,
            port=port(),
        ):
            return
    raise LaunchError(
        f"no free port for the rendezvous on 127.0.0.1 after {PORT_ATTEMPTS} attempts; logs are in {log_dir}"
    )


def _attempt(
    command: Sequence[str],
    *,
    nodes: int,
    nproc_per_node: int,
    directory: Path,
    interrupts: Interrupts,
    environment: Mapping[str, str],
    poll: Callable[[], None],
    port: int,
) -> bool:
    """One launch on one port; False if the port was taken."""
    launch_id = uuid.uuid4().hex
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(nodes * nproc_per_node))),
        # All nodes are this machine, so ranks count its devices together (see `bench.worker`).
        "ZEROKIT_NODES_ON_MACHINE": str(nodes),
        **environment,
        MARK: launch_id,
    }
    if sys.platform == "linux":
        # gloo otherwise looks its own host name up, which in many containers leads nowhere.
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    agents: list[_Agent] = []
    try:
        for node in range(nodes):
            interrupts.check()
            agents.append(_start_agent(node, nodes, nproc_per_node, port, directory, variables, command))
        _wait(agents, interrupts, poll)
        failed = [agent for agent in agents if agent.process.returncode != 0]
        if not failed:
            return True
        if _port_was_taken(agents):
            return False
        raise _explain(failed, directory)
    except Interrupted as error:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                agent.process.send_signal(error.signal_number)
        _await_end(agents, GRACE_SECONDS)
        raise
    finally:
        _end(agents, launch_id)


def _start_agent(
    node: int,
    nodes: int,
    nproc_per_node: int,
    port: int,
    directory: Path,
    variables: Mapping[str, str],
    command: Sequence[str],
) -> _Agent:
    place = directory / f"node-{node}"
    place.mkdir(parents=True)
    torchrun = (
        f"--nnodes {nodes} --node-rank {node} --nproc-per-node {nproc_per_node} --max-restarts 0 "
        f"--rdzv-backend static --master-addr 127.0.0.1 --master-port {port} --redirects 3"
    ).split()
    agent = [sys.executable, "-m", "zerokit.launch.agent", str(place / "report.json"), str(os.getpid())]
    with (place / "agent.log").open("wb") as log:
        process = subprocess.Popen(
            [*agent, *torchrun, "--log-dir", str(place), "-m", "zerokit.launch.rank", *command],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a Ctrl-C at the terminal comes to us alone, and we pass it on
        )
    return _Agent(node, process, place)


def _wait(agents: Sequence[_Agent], interrupts: Interrupts, poll: Callable[[], None]) -> None:
    """Until all agents have ended, or one has failed and the others had time to follow."""
    failed_at: float | None = None
    while _running(agents):
        interrupts.check()
        poll()
        if failed_at is None and any(agent.process.returncode for agent in agents):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > PEERS_FOLLOW_SECONDS:
            return
        time.sleep(POLL_SECONDS)
    poll()


def _running(agents: Sequence[_Agent]) -> list[_Agent]:
    return [agent for agent in agents if agent.process.poll() is None]


def _await_end(agents: Sequence[_Agent], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _running(agents) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _end(agents: Sequence[_Agent], launch_id: str) -> None:
    """Kill whatever is left: first the ranks, so that their agents reap them, then the agents."""
    if _running(agents):
        kill_marked(launch_id, spare=frozenset(agent.process.pid for agent in agents))
        _await_end(agents, 1.0)
    for agent in agents:
        if agent.process.poll() is None:
            agent.process.kill()
        agent.process.wait()
    kill_marked(launch_id)


def _port_was_taken(agents: Sequence[_Agent]) -> bool:
    for agent in agents:
        with contextlib.suppress(OSError, ValueError):
            if "EADDRINUSE" in str(json.loads(agent.report.read_text()).get("error", "")):
                return True
    return False


def _failures(agent: _Agent) -> list[Failure]:
    """What the agent reported; empty if it was killed itself or never came to start ranks."""
    try:
        reported = json.loads(agent.report.read_text()).get("failures", [])
    except (OSError, ValueError):
        return []
    found = []
    for entry in reported:
        message, expected, moment = entry["message"], False, float(entry["time"])
        if isinstance(message, dict):
            extra = message.get("extraInfo", {})
            expected, moment = bool(extra.get("expected")), float(extra.get("time", moment))
            message = message.get("message", "")
        elif entry["exit_code"] >= 0:
            message = ""  # torchrun's advice on how to see a traceback, not a reason
        log = _stderr_of(agent, entry["rank"])
        found.append(
            Failure(
                entry["rank"], agent.node, entry["pid"], entry["exit_code"], message, expected, moment, log
            )
        )
    return found


def _stderr_of(agent: _Agent, rank: int) -> Path | None:
    """Where torchrun redirected it: LOG_DIR/RUN/attempt_0/LOCAL_RANK/stderr.log, with one RUN here."""
    logs = sorted(agent.directory.glob("*/attempt_*/*/stderr.log"), key=lambda path: int(path.parent.name))
    return logs[rank - agent.node * len(logs)] if logs else None


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])


def _explain(failed: Sequence[_Agent], directory: Path) -> WorkerFailed:
    failures = sorted((one for agent in failed for one in _failures(agent)), key=lambda one: one.cause_order)
    killed = [agent for agent in failed if (agent.process.returncode or 0) < 0]
    if killed or not failures:
        agent = (killed or failed)[0]
        code = agent.process.returncode or 0
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
        message = f"node {agent.node}: its torchrun agent (pid {agent.process.pid}) {how}"
        return WorkerFailed("\n".join([message, _tail(agent.directory / "agent.log"), f"logs: {directory}"]))
    cause = failures[0]
    lines = [cause.describe()]
    if not cause.expected and cause.stderr is not None and (tail := _tail(cause.stderr)):
        lines += [f"the end of rank {cause.rank}'s stderr:", tail]
    # The others mostly lost their peer, or were ended by their agent.
    if others := [one for one in failures[1:] if one.exit_code >= 0]:
        ranks = ", ".join(str(one.rank) for one in sorted(others, key=lambda one: one.rank))
        said = textwrap.shorten(others[0].message, 120, placeholder=" …") or "without a message"
        lines.append(f"after it failed: rank {ranks} ({said})")
    return WorkerFailed("\n".join([*lines, f"logs: {directory}"]), failures)
