r"""Nodes on other machines, each reached with a command that runs `zerokit.cluster.member`: `ssh host …`, `srun …`.

    launch -- ssh a … member -- rank 0, rank 1
          \-- ssh b … member -- rank 2, rank 3

First every node identifies itself; only then, with one version everywhere, ranks are started. The job's folder is sent
to every node as it is, and files written in it are sent back, so that the machines need no directory in common. The
launcher's store carries all of it: to hosts through ssh itself, which forwards a port there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerokit.cluster import mail
from zerokit.cluster.leader import LOOK, Lost, Member, dismiss, meet, start_ranks
from zerokit.cluster.mail import LEADER, Mail, Message
from zerokit.interrupts import Interrupts
from zerokit.launch.agents import GRACE_SECONDS, conduct
from zerokit.launch.failures import LaunchError, name_node, tail
from zerokit.launch.ranks import World
from zerokit.patience import Patience

FORWARDED = re.compile(
    r"(ZEROKIT|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|CUBLAS|FI|UCX|HF)_\w+|PYTHONPATH|PYTHONHASHSEED"
)
"""Variables of this process that the ranks get, beside those that the user names."""
_CONNECT_SECONDS = 60.0
_END_SECONDS = 10.0
_LAST_WORDS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RemoteHost:
    """A machine that runs one node.

    Attributes:
        name: for messages.
        command: the command that starts the node, from the port of this process's store and the node's name there.
        without: variables of this process that the command does not get.
    """

    name: str
    command: Callable[[int, str], Sequence[str]]
    without: tuple[str, ...] = ()


_PYTHON = "name its Python with --remote-python"
_REMEDIES = {
    "permission denied": "give this user's key to that host (ssh-copy-id), or name another with --ssh-option '-i FILE'",
    "host key verification failed": "connect once by hand (ssh HOST true) to accept the host's key",
    "remote port forwarding failed": "its sshd must allow TCP forwarding (AllowTcpForwarding), by which nodes reach "
    "this machine; else start zerokit by torchrun on each node",
    "no module named": f"install zerokit there at the same path, or {_PYTHON}",
    "not found": f"there is no such Python there: {_PYTHON}",
    "no such file or directory": f"there is no such Python there: {_PYTHON}",
    "--container": "this Slurm has no Pyxis: use --container-runtime apptainer",
}
"""What to do about what ssh, srun or the machine's shell said."""


def node_command(python: str, address: str, port: int, name: str) -> str:
    """A shell line that starts a node, in the working directory if the machine has it.

    The node finds the launcher's store at this address and port. As in `ranks.start_rank`, modules are not looked for
    in the working directory.
    """
    path = os.environ.get("PYTHONPATH")
    environment = "" if path is None else f"env PYTHONPATH={shlex.quote(path)} "
    return (
        f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; exec {environment}{shlex.quote(python)} "
        f"-P -m zerokit.cluster.member {address} {port} {name}"
    )


class _Node(Member):
    """A member on another machine, and the connection by which it was started."""

    def __init__(self, letters: Mail, number: int, host: RemoteHost, port: int, log_dir: Path) -> None:
        (folder := log_dir / f"node-{number}").mkdir()
        self._log, self._last_words = folder / "connection.log", Patience(_LAST_WORDS_SECONDS)
        command = host.command(port, str(number))
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command,
                    env={name: value for name, value in os.environ.items() if name not in host.without},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a Ctrl-C at the terminal reaches us alone, and we pass it on
                )
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be run ({error.strerror}): install it") from error
        super().__init__(letters.peers[str(number)], name_node(number, host.name), host.name)

    def hear(self) -> Message | None:
        try:
            message = super().hear()
        except Lost as error:
            raise Lost("\n".join(filter(None, (str(error), tail(self._log))))) from None
        if message is not None or self._process.poll() is None:
            self._last_words.restart()
            return message
        if not self._last_words.over:  # what it said last may be on its way
            return None
        what = "was lost while its ranks ran: the connection ended" if self.hello else "did not start"
        said = self._log.read_text(errors="replace").lower()
        remedy = next(
            (remedy for words, remedy in _REMEDIES.items() if words in said), LOOK if self.hello else None
        )
        lines = [f"{self.where} {what} with exit code {self._process.returncode}", tail(self._log), remedy]
        raise Lost("\n".join(line for line in lines if line))

    def explain_silence(self) -> str:
        if self.hello:
            return super().explain_silence()
        return (
            f"{self.where} did not answer in time: check that the machine is up and reachable, or raise "
            "--connect-timeout"
        )

    def disconnect(self) -> None:
        """End the connection: at once, if the node has not answered, and has started nothing, or is lost."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS if self.hello and self.lost is None else 0.0)
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
    grace: float = GRACE_SECONDS,
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
        grace: the seconds in which ranks may end by themselves after a signal.

    Raises:
        LaunchError: a node did not answer, or is not equal to this machine.
        WorkerFailed: a rank failed or was killed, or a node was lost.
        Interrupted: SIGINT or SIGTERM came; it was passed on.
    """
    nodes: list[_Node] = []
    forwarded = {name: value for name, value in os.environ.items() if FORWARDED.fullmatch(name)}
    store, port = mail.host_store(0)
    names = [str(number) for number in range(len(hosts))]
    with Mail(store, LEADER, names, connect_seconds) as letters:
        try:
            nodes.extend(_Node(letters, number, host, port, log_dir) for number, host in enumerate(hosts))
            meet(nodes, interrupts, "or give the right Python there with --remote-python")
            address = master_addr or hosts[0].name.rpartition("@")[2]
            variables = {**forwarded, **(environment or {})}
            world = World(len(nodes), nproc_per_node, address, nodes[0].hello["port"], variables)
            command = [module, *arguments]
            agents = start_ranks(
                dict(enumerate(nodes)), world, nproc_per_node, command, log_dir, follow=follow
            )
            conduct(agents, log_dir, interrupts, poll, grace)
        finally:
            dismiss([one for one in nodes if one.hello], 0)
            for one in nodes:
                one.disconnect()
