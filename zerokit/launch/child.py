"""One member's part of a launch on ranks that another launcher has started, and its cores."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerokit.launch.agents import GRACE_SECONDS
from zerokit.launch.failures import name_node
from zerokit.launch.frames import relocate
from zerokit.launch.membership import Membership
from zerokit.launch.network import address_towards, interface_of
from zerokit.launch.processes import MARK, StoppedProcesses, kill_marked


def own_cores() -> list[int]:
    """The cores that this process may use."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return list(range(os.cpu_count() or 1))


def share_cores(members: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """The number of threads for each member, from its host and cores; shared cores are divided."""
    shares = []
    for host, cores in members:
        sharing = sum(1 for other, theirs in members if other == host and not set(cores).isdisjoint(theirs))
        shares.append(max(1, len(cores) // max(1, sharing)))
    return shares


class Child:
    """This member's part of a launch: one rank, or torchrun's agent for a whole node."""

    host: str | None = None

    def __init__(self, member: Membership, request: Mapping[str, Any], folder: Path, log_dir: Path) -> None:
        """Start it.

        Args:
            member: which part.
            request: the launch, as the leader has sent it.
            folder: where the job's files lie here.
            log_dir: for its output.
        """
        self.node = member.node
        self.directory = log_dir / f"member-{member.index}"
        self.directory.mkdir(parents=True)
        self._member = member
        self._launch_id = uuid.uuid4().hex
        self._stopped = StoppedProcesses()
        rank = ["-m", "zerokit.launch.rank", request["module"]]
        rank += relocate(request["arguments"], request["folder"], folder)
        command = [sys.executable, *rank]
        if member.whole_node:
            command = self._agent(request, rank)
        with (
            (self.directory / "agent.log").open("wb") as out,
            (self.directory / "stderr.log").open("wb") as err,
        ):
            self._process = subprocess.Popen(
                command,
                env=self._variables(request),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out if member.whole_node else err,
                start_new_session=True,
            )

    def _agent(self, request: Mapping[str, Any], rank: Sequence[str]) -> list[str]:
        torchrun = (
            f"--nnodes {request['nodes']} --node-rank {self._member.node} --nproc-per-node {request['nproc_per_node']} "
            f"--max-restarts 0 --rdzv-backend static --master-addr {self._member.master_addr} "
            f"--master-port {request['port']} --redirects 3"
        ).split()
        agent = [
            sys.executable,
            "-m",
            "zerokit.launch.agent",
            str(self.directory / "report.json"),
            str(os.getpid()),
        ]
        return [*agent, *torchrun, "--log-dir", str(self.directory), *rank]

    def _variables(self, request: Mapping[str, Any]) -> dict[str, str]:
        member = self._member
        ours = ("TORCHELASTIC_", "PET_")  # of the launch around: this one has others
        variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        variables |= {MARK: self._launch_id, "ZEROKIT_AGENT_PID": str(os.getpid())}
        threads = request["threads"][member.index]
        if member.whole_node:
            threads //= request["nproc_per_node"]
        variables.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
        with contextlib.suppress(OSError):
            # gloo otherwise looks the host's own name up, which on many machines leads to loopback.
            interface = interface_of(address_towards(member.master_addr))
            if interface is not None:
                variables.setdefault("GLOO_SOCKET_IFNAME", interface)
        if not member.whole_node:
            variables |= {
                "RANK": str(member.index),
                "WORLD_SIZE": str(member.count),
                "LOCAL_RANK": str(member.local_rank),
                "LOCAL_WORLD_SIZE": str(request["nproc_per_node"]),
                "GROUP_RANK": str(member.node),
                "MASTER_ADDR": member.master_addr,
                "MASTER_PORT": str(request["port"]),
                "TORCHELASTIC_ERROR_FILE": str(self.directory / "error.json"),
            }
        return variables

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is None:
            self._stopped.look([self._process.pid])
        if code is None or code == 0 or self._member.whole_node:
            return code
        self._report(code)
        return code if code > 0 else 128 - code  # a negative code would mean that an agent was killed

    def _report(self, code: int) -> None:
        """How the rank ended, in the form of an agent's report."""
        report = self.directory / "report.json"
        if report.exists():
            return
        message: Any = self._stopped.explain(self._process.pid) or ""
        with contextlib.suppress(OSError, ValueError):
            message = json.loads((self.directory / "error.json").read_text())["message"]
        failure = {
            "rank": self._member.index,
            "pid": self._process.pid,
            "exit_code": code,
            "message": message,
            "stopped": self._process.pid in self._stopped.killed,
            "time": time.time(),
            "stderr": "stderr.log",
        }
        report.write_text(json.dumps({"failures": [failure]}))

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def stopped(self) -> str | None:
        """The reason if the agent of a whole node was stopped for too long."""
        return self._stopped.explain(self._process.pid) if self._member.whole_node else None

    def trouble(self) -> str | None:
        how = self.stopped()
        return how and f"{name_node(self.node, self.host)}: its torchrun agent {how}"

    def end(self) -> None:
        """Kill the remaining processes."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        kill_marked(self._launch_id, spare=frozenset([self._process.pid]))
        self._process.kill()
        self._process.wait()
        kill_marked(self._launch_id)
