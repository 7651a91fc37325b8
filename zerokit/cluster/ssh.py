"""Nodes over ssh: one connection per node, which also forwards a port there to the launcher's store."""

from __future__ import annotations

import random
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from zerokit.cluster.remote import RemoteHost, node_command
from zerokit.errors import UsageError
from zerokit.network import PORTS
from zerokit.ssh import ssh_command


def ssh_host(host: str, options: Sequence[str], python: str, connect_seconds: float) -> RemoteHost:
    """Start a node on a host; `options` are ssh's own, as on its command line."""

    def command(port: int, name: str) -> Sequence[str]:
        there = random.SystemRandom().choice(PORTS)
        forward = ("-o", "ExitOnForwardFailure=yes", "-R", f"127.0.0.1:{there}:127.0.0.1:{port}")
        # The user's shell there may be one that does not know redirections as sh does (csh).
        line = shlex.join(["exec", "sh", "-c", node_command(python, "127.0.0.1", there, name)])
        return ssh_command(host, (*options, *forward), connect_seconds, line)

    return RemoteHost(host, command)


def ssh_address(host: str, options: Sequence[str]) -> str:
    """The host name behind an alias in ssh's configuration, by which other nodes reach it."""
    done = subprocess.run(["ssh", *options, "-G", host], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("hostname "):
            return line.removeprefix("hostname ").strip()
    return host.rpartition("@")[2]


def require_ssh() -> None:
    """Raise `UsageError` if ssh is not installed."""
    if shutil.which("ssh") is None:
        raise UsageError("--launcher ssh needs the program ssh: install openssh-client")
