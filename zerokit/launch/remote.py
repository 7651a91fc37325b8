r"""Nodes on other machines, each reached with a command that runs `zerokit.launch.node`: `ssh host …`, `srun …`.

    launch -- ssh a … node -- rank 0, rank 1
          \-- ssh b … node -- rank 2, rank 3

First every node identifies itself; only then, with one version everywhere, ranks are started. The job's folder is sent
to every node as it is, and files written in it are sent back, so that the machines need no directory in common.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokit.launch.agents import await_end, conduct, end_all
from zerokit.launch.distant import DistantAgent, launch_frame
from zerokit.launch.failures import LaunchError, tail
from zerokit.launch.frames import Peer
from zerokit.launch.interrupts import Interrupts
from zerokit.launch.ranks import World
from zerokit.patience import Patience
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

    The command does not get the variables of this process that are named in `without`.
    """

    name: str
    command: tuple[str, ...]
    without: tuple[str, ...] = ()


_PYTHON = "name its Python with --remote-python"
_REMEDIES = {
    "permission denied": "give this user's key to that host (ssh-copy-id), or name another with --ssh-option '-i FILE'",
    "host key verification failed": "connect once by hand (ssh HOST true) to accept the host's key",
    "no module named": f"install zerokit there at the same path, or {_PYTHON}",
    "not found": f"there is no such Python there: {_PYTHON}",
    "no such file or directory": f"there is no such Python there: {_PYTHON}",
    "--container": "this Slurm has no Pyxis: use --container-runtime apptainer",
}
"""What to do about what ssh, srun or the machine's shell said."""


def node_command(python: str) -> str:
    """A shell line that starts the node program, in the working directory if the machine has it.

    As in `ranks.start_rank`, modules are not looked for there.
    """
    path = os.environ.get("PYTHONPATH")
    environment = "" if path is None else f"env PYTHONPATH={shlex.quote(path)} "
    return (
        f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; exec {environment}{shlex.quote(python)} "
        "-P -m zerokit.launch.node"
    )


class RemoteAgent(DistantAgent):
    """One node on another machine."""

    def __init__(self, node: int, host: RemoteHost, log_dir: Path) -> None:
        (folder := log_dir / f"node-{node}").mkdir()
        self._log = folder / "connection.log"
        try:
            with self._log.open("ab") as log:  # as `_keep` does, so that neither writes over the other
                self._process = subprocess.Popen(
                    host.command,
                    env={name: value for name, value in os.environ.items() if name not in host.without},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # a Ctrl-C at the terminal reaches us alone, and we pass it on
                )
        except OSError as error:
            raise LaunchError(f"{host.command[0]} cannot be run ({error.strerror}): install it") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        super().__init__(
            Peer(self._process.stdout, self._process.stdin, self._keep), node, host.name, log_dir
        )

    def _keep(self, line: bytes) -> None:
        with self._log.open("ab") as log:
            log.write(line)

    def lost(self) -> str:
        """How the connection ended."""
        self.end()
        what = "did not start" if self.hello is None else "was lost while its ranks ran: the connection ended"
        said = self._log.read_text(errors="replace").lower()
        remedy = next((remedy for words, remedy in _REMEDIES.items() if words in said), None)
        lines = [f"{self.where} {what} with exit code {self._process.returncode}", tail(self._log), remedy]
        return "\n".join(line for line in lines if line)

    def end(self) -> None:
        """End the node and the connection by closing its pipe."""
        self.peer.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A node that has not said hello has started nothing.
            self._process.wait(1.0 if self.hello is None else _END_SECONDS)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # a proxy of ssh's as well
        self._process.wait()


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
    """Run `python -m module arguments` on every host's ranks and wait for all of them, as `local.launch` does here.

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
    forwarded = {name: value for name, value in os.environ.items() if FORWARDED.fullmatch(name)}
    try:
        agents.extend(RemoteAgent(node, host, log_dir) for node, host in enumerate(hosts))
        first = _await_hellos(agents, interrupts, connect_seconds)
        address = master_addr or hosts[0].name.rpartition("@")[2]
        world = World(
            len(hosts), nproc_per_node, address, first["port"], {**forwarded, **(environment or {})}
        )
        start = launch_frame(world, log_dir, [module, *arguments], follow=follow)
        for agent in agents:
            ranks = [agent.node * nproc_per_node, (agent.node + 1) * nproc_per_node]
            agent.peer.say("start", ranks=ranks, **start)
    except BaseException:
        end_all(agents)
        raise
    conduct(agents, log_dir, interrupts, poll)


def _await_hellos(agents: Sequence[RemoteAgent], interrupts: Interrupts, seconds: float) -> Mapping[str, Any]:
    """What the first says of itself."""
    patience = Patience(seconds)
    while missing := [agent for agent in agents if agent.hello is None]:
        interrupts.check()
        if any(_never_answered(agent) for agent in missing):
            await_end(missing, 1.0)  # others that fail by the same cause are named too
            raise LaunchError("\n".join(agent.trouble or "" for agent in missing if _never_answered(agent)))
        if patience.over:
            names = ", ".join(agent.where for agent in missing)
            raise LaunchError(
                f"{names} did not answer within {seconds:g} s: check that the machine is up and reachable, or "
                "raise --connect-timeout"
            )
        time.sleep(0.05)
    hellos = [agent.hello for agent in agents if agent.hello is not None]
    for agent, hello in zip(agents, hellos, strict=True):
        if (difference := describe_difference(agent.where, hello.get("versions"))) is not None:
            raise LaunchError(f"{difference}, or give the right Python there with --remote-python")
    return hellos[0]


def _never_answered(agent: RemoteAgent) -> bool:
    """Whether it has ended without a hello; asked in this order, as `poll` reads what an ended one said last."""
    return agent.poll() is not None and agent.hello is None
