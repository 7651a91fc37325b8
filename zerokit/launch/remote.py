r"""Nodes on other machines, each reached with a command that runs `zerokit.launch.node`: `ssh host …`, `srun …`.

    launch -- ssh a … node -- agent (node 0) -- rank 0, rank 1
          \-- ssh b … node -- agent (node 1) -- rank 2, rank 3

First every node identifies itself; only then, with one version everywhere, ranks are started, by static rendezvous at
node 0. The job's folder is sent to every node as it is, and files written in it are sent back, so that the machines
need no directory in common.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokit.errors import ZerokitError
from zerokit.launch import frames
from zerokit.launch.agents import attend, await_end, explain, pass_on, running
from zerokit.launch.failures import LaunchError, name_node, tail
from zerokit.launch.frames import frame, pack, parse, put_file, read_lines
from zerokit.launch.interrupts import Interrupted, Interrupts
from zerokit.versions import describe_difference

FORWARDED = re.compile(
    r"(ZEROKIT|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|CUBLAS|FI|UCX|HF)_\w+|PYTHONPATH|PYTHONHASHSEED"
)
"""Variables of this process that the ranks get, beside those that the user names."""
_CONNECT_SECONDS = 30.0
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RemoteHost:
    """A machine that runs one node: its display name, and the command that runs a program on it.

    `advise` turns what that command said into the remedy, if it knows one.
    """

    name: str
    command: tuple[str, ...]
    advise: Callable[[str], str | None] = lambda output: None


def node_command(python: str, directory: Path | None = None) -> str:
    """A shell line that starts the node program, in this directory if the machine has it."""
    directory = Path.cwd() if directory is None else directory
    path = os.environ.get("PYTHONPATH")
    environment = "" if path is None else f"env PYTHONPATH={shlex.quote(path)} "
    return (
        f"cd {shlex.quote(str(directory))} 2>/dev/null; exec {environment}{shlex.quote(python)} "
        "-m zerokit.launch.node"
    )


class RemoteAgent:
    """The agent of one node on another machine."""

    def __init__(self, node: int, host: RemoteHost, log_dir: Path) -> None:
        self.node = node
        self.host: str | None = host.name
        self.directory = log_dir / f"node-{node}"
        self.directory.mkdir(parents=True)
        self.hello: dict[str, Any] | None = None
        self._advise, self._log_dir = host.advise, log_dir
        self._code: int | None = None
        self._beat = self._heard = time.monotonic()
        self._silent = False
        self._damage: str | None = None
        self._trouble: str | None = None
        self._drained = False
        self._log = self.directory / "connection.log"
        with self._log.open("ab") as log:  # as `_read` does, so that neither writes over the other
            self._process = subprocess.Popen(
                host.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal reaches us alone, and we pass it on
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in read_lines(self._process.stdout, self._hear):
            message = parse(line)
            try:
                if message is None:
                    with self._log.open("ab") as log:
                        log.write(line)
                elif message[0] == "hello":
                    self.hello = message[1]
                elif message[0] == "file":
                    put_file(self._log_dir, message[1])
                elif message[0] == "exit":
                    self._code = int(message[1]["code"])
                    self._trouble = message[1].get("trouble")
            except (KeyError, ValueError, OSError, ZerokitError) as error:
                self._damage = str(error)

    def _hear(self) -> None:
        self._heard = time.monotonic()

    def say(self, kind: str, **content: Any) -> None:
        """Send to the node; a lost connection shows in its exit code."""
        self._write(frame(kind, **content))

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def poll(self) -> int | None:
        now = time.monotonic()
        if now - self._beat > frames.HEARTBEAT_SECONDS:
            self._beat = now
            self._write(b"\n")
        if self._process.poll() is None:
            if self.hello is not None and now - self._heard > frames.SILENCE_SECONDS:
                self._silent = True
                self._kill()
            return None
        if not self._drained:
            self._reader.join(_END_SECONDS)
            self._drained = True
        return 1 if self._code is None or self._damage is not None else self._code

    def send_signal(self, number: int) -> None:
        self.say("signal", number=number)

    def trouble(self) -> str | None:
        """How the connection ended, if the node could not report its ranks."""
        if self._process.poll() is None:
            return None
        where = name_node(self.node, self.host)
        if self._silent:
            return (
                f"{where}: nothing was heard of it for {frames.SILENCE_SECONDS:g} s: its program is stopped, or its "
                "machine or the network between is gone"
            )
        if self._trouble is not None:
            return f"{where}: its torchrun agent {self._trouble}"
        if self._code is not None:
            return self._damage and f"{where}: what it sent could not be kept: {self._damage}"
        output = tail(self._log)
        remedy = self._advise(self._log.read_text(errors="replace"))
        what = "did not start" if self.hello is None else "was lost while its ranks ran: the connection ended"
        detail = "" if self._damage is None else f" ({self._damage})"
        lines = [f"{where} {what} with exit code {self._process.returncode}{detail}", output, remedy]
        return "\n".join(line for line in lines if line)

    def end(self) -> None:
        """End the node and the connection by closing its pipe."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A node that has not said hello has started nothing.
            self._process.wait(1.0 if self.hello is None else _END_SECONDS)
        if self._process.poll() is None:
            self._kill()
        self._process.wait()
        self._reader.join(1.0)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a proxy of ssh's as well


def launch_on(
    hosts: Sequence[RemoteHost],
    module: str,
    arguments: Sequence[str],
    *,
    nproc_per_node: int,
    log_dir: Path,
    interrupts: Interrupts,
    poll: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] | None = None,
    master_addr: str | None = None,
    connect_seconds: float = _CONNECT_SECONDS,
    follow: bool = False,
) -> None:
    """Run `python -m module arguments` on nproc_per_node ranks of every host and wait for all of them.

    Args:
        hosts: the machines, in the order of their nodes.
        module: what each rank runs; it finds the torchrun environment.
        arguments: its command line; paths in `log_dir` become those of the copy on each node.
        nproc_per_node: ranks of each node.
        log_dir: the job's folder: its files are copied to every node, and those written beside them come back.
        interrupts: looked at while waiting.
        poll: called about twenty times a second while the ranks run.
        environment: variables set for every rank, beside those of `FORWARDED`.
        master_addr: where the others reach node 0; by default the name of its host.
        connect_seconds: how long a node may take to answer.
        follow: whether ranks' logs are sent back while they grow.

    Raises:
        LaunchError: a node did not answer, or is not equal to this machine.
        WorkerFailed: a rank failed or was killed, or a node was lost.
        Interrupted: SIGINT or SIGTERM came; it was passed on.
    """
    agents: list[RemoteAgent] = []
    files = {
        path.name: pack(path.read_bytes())
        for path in log_dir.iterdir()
        if path.is_file() and not path.name.startswith(".")
    }
    forwarded = {name: value for name, value in os.environ.items() if FORWARDED.fullmatch(name)}
    try:
        agents.extend(RemoteAgent(node, host, log_dir) for node, host in enumerate(hosts))
        _await_hellos(agents, interrupts, connect_seconds)
        first = agents[0].hello
        assert first is not None
        for agent in agents:
            agent.say(
                "start",
                module=module,
                arguments=list(arguments),
                folder=str(log_dir),
                files=files,
                follow=follow,
                node=agent.node,
                nodes=len(hosts),
                nproc_per_node=nproc_per_node,
                master_addr=master_addr or hosts[0].name.rpartition("@")[2],
                master_port=first["port"],
                environment={**forwarded, **(environment or {})},
            )
        attend(agents, interrupts, poll)
        if any(agent.poll() != 0 for agent in agents):
            raise explain(agents, log_dir)
    except Interrupted as error:
        pass_on(agents, error.signal_number)
        raise
    finally:
        _end(agents)


def _end(agents: Sequence[RemoteAgent]) -> None:
    enders = [threading.Thread(target=agent.end) for agent in agents]
    for ender in enders:
        ender.start()
    for ender in enders:
        ender.join()


def _await_hellos(agents: Sequence[RemoteAgent], interrupts: Interrupts, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while missing := [agent for agent in agents if agent.hello is None]:
        interrupts.check()
        running(agents)  # those that have answered hear that we are alive
        if any(_never_answered(agent) for agent in missing):
            await_end(missing, 1.0)  # others that fail by the same cause are named too
            raise LaunchError("\n".join(agent.trouble() or "" for agent in missing if _never_answered(agent)))
        if time.monotonic() > deadline:
            names = ", ".join(name_node(agent.node, agent.host) for agent in missing)
            raise LaunchError(
                f"{names} did not answer within {seconds:g} s: check that the machine is up and reachable, or "
                "raise --connect-timeout"
            )
        time.sleep(0.05)
    for agent in agents:
        assert agent.hello is not None
        where = name_node(agent.node, agent.host)
        if (difference := describe_difference(where, agent.hello.get("versions"))) is not None:
            raise LaunchError(f"{difference}, or give the right Python there with --remote-python")


def _never_answered(agent: RemoteAgent) -> bool:
    """Whether it has ended without a hello; asked in this order, as `poll` reads what an ended one said last."""
    return agent.poll() is not None and agent.hello is None
