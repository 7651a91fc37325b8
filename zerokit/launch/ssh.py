"""Nodes over ssh: one connection per node; when it ends, the node ends everything."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

from zerokit.errors import UsageError
from zerokit.launch.remote import RemoteHost, node_command

_REMEDIES = (
    (
        "could not resolve hostname",
        "the name does not resolve here: correct it in --hosts, or add it to DNS or /etc/hosts",
    ),
    (
        "permission denied",
        "give this user's key to that host (ssh-copy-id), or name another with --ssh-option '-i FILE'",
    ),
    ("host key verification failed", "connect once by hand (ssh HOST true) to accept the host's key"),
    (
        "remote host identification has changed",
        "the host's key is another than before: see that it is the right machine",
    ),
    (
        "connection refused",
        "no ssh server listens there: start sshd, or give its port with --ssh-option '-p PORT'",
    ),
    ("no route to host", "the machine is down or in another network"),
    ("network is unreachable", "the machine is in another network"),
    ("timed out", "the machine is down, or a firewall drops what is sent to it"),
    ("not responding", "the machine or the network between has stopped answering"),
    ("no module named", "install zerokit there at the same path, or name its Python with --remote-python"),
    ("not found", "there is no such Python there: name one with --remote-python"),
    ("no such file or directory", "there is no such Python there: name one with --remote-python"),
)


@dataclass(frozen=True, slots=True)
class Ssh:
    """The options for reaching hosts.

    Attributes:
        options: of ssh itself, as on its command line.
        python: on the hosts; by default this one's path.
        connect_seconds: for the connection.
    """

    options: tuple[str, ...] = ()
    python: str = sys.executable
    connect_seconds: float = 30.0

    def remote(self, host: str) -> RemoteHost:
        """Start a node on a host."""
        patience = (
            "-o", "BatchMode=yes",
            "-o", f"ConnectTimeout={max(1, round(self.connect_seconds))}",
            "-o", "ServerAliveInterval=5",
            "-o", "ServerAliveCountMax=3",
        )  # fmt: skip
        # The user's shell there may be one that does not know redirections as sh does (csh).
        line = shlex.join(["exec", "sh", "-c", node_command(self.python)])
        return RemoteHost(host, ("ssh", "-T", *self.options, *patience, host, line), advise)

    def address(self, host: str) -> str:
        """The host name behind an alias in ssh's configuration, by which other nodes reach it."""
        done = subprocess.run(["ssh", *self.options, "-G", host], capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            if line.startswith("hostname "):
                return line.removeprefix("hostname ").strip()
        return host.rpartition("@")[2]


def advise(output: str) -> str | None:
    """Advice for a message of ssh or the remote shell."""
    lowered = output.lower()
    return next((remedy for words, remedy in _REMEDIES if words in lowered), None)


def require_ssh() -> None:
    """Raise `UsageError` if ssh is not installed."""
    if shutil.which("ssh") is None:
        raise UsageError("--launcher ssh needs the program ssh: install openssh-client")
