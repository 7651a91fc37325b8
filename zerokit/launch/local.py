r"""Simulated nodes on this machine: one torchrun agent per node, with static rendezvous over loopback.

    launch(...) -- agent (node 0) -- rank 0, rank 1
                \- agent (node 1) -- rank 2, rank 3

Invariant: when `launch` returns or raises, no process that it started is alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerokit.launch.agents import attend, await_end, explain, pass_on, running
from zerokit.launch.failures import LaunchError, signal_name
from zerokit.launch.interrupts import Interrupted, Interrupts
from zerokit.launch.network import free_port
from zerokit.launch.processes import MARK, StoppedProcesses, kill_marked

PORT_ATTEMPTS = 5


@dataclass(slots=True)
class LocalAgent:
    """torchrun's agent in a process on this machine."""

    node: int
    process: subprocess.Popen[bytes]
    directory: Path
    host: str | None = None
    stopped: StoppedProcesses = field(default_factory=StoppedProcesses)

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is None:
            self.stopped.look([self.process.pid])
        return code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def trouble(self) -> str | None:
        code = self.process.poll()
        if code is None or code >= 0:
            return None
        how = self.stopped.explain(self.process.pid) or f"was killed by {signal_name(-code)}"
        return f"node {self.node}: its torchrun agent (pid {self.process.pid}) {how}"


def threads_per_rank(ranks: int) -> int:
    """The cores that this process may use, divided among ranks; at least one each."""
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
    agents: list[LocalAgent] = []
    try:
        for node in range(nodes):
            interrupts.check()
            agents.append(_start_agent(node, nodes, nproc_per_node, port, directory, variables, command))
        attend(agents, interrupts, poll)
        if all(agent.poll() == 0 for agent in agents):
            return True
        if _port_was_taken(agents):
            return False
        raise explain(agents, directory)
    except Interrupted as error:
        pass_on(agents, error.signal_number)
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
) -> LocalAgent:
    folder = directory / f"node-{node}"
    folder.mkdir(parents=True)
    torchrun = (
        f"--nnodes {nodes} --node-rank {node} --nproc-per-node {nproc_per_node} --max-restarts 0 "
        f"--rdzv-backend static --master-addr 127.0.0.1 --master-port {port} --redirects 3"
    ).split()
    agent = [sys.executable, "-m", "zerokit.launch.agent", str(folder / "report.json"), str(os.getpid())]
    with (folder / "agent.log").open("wb") as log:
        process = subprocess.Popen(
            [*agent, *torchrun, "--log-dir", str(folder), "-m", "zerokit.launch.rank", *command],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a Ctrl-C at the terminal reaches us alone, and we pass it on
        )
    return LocalAgent(node, process, folder)


def _end(agents: Sequence[LocalAgent], launch_id: str) -> None:
    """Kill whatever is left: first the ranks, so that their agents reap them, then the agents."""
    if running(agents):
        kill_marked(launch_id, spare=frozenset(agent.process.pid for agent in agents))
        await_end(agents, 1.0)
    for agent in agents:
        if agent.process.poll() is None:
            agent.process.kill()
        agent.process.wait()
    kill_marked(launch_id)


def _port_was_taken(agents: Sequence[LocalAgent]) -> bool:
    for agent in agents:
        with contextlib.suppress(OSError, ValueError):
            if "EADDRINUSE" in str(
                json.loads((agent.directory / "report.json").read_text()).get("error", "")
            ):
                return True
    return False
