"""Hosts on this machine: namespaces with names and addresses of their own, an sshd each, and wires to a bridge.

Only root can make them; where it cannot be done, `hosts_refusal` says why.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
HUB = "hub"
"""The host of the bridge; the other end of the wire to host a is `to-a` there."""
_TOOLS = ("ssh", "ssh-keygen", "/usr/sbin/sshd")


def refusal() -> str | None:
    """Why there can be no namespaces here; None where there can."""
    if shutil.which("tc") is None:
        return "tc not installed (package iproute2)"
    command = ["unshare", "--mount", "--net", "--uts", "ip", "link", "set", "lo", "up"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"needs root, unshare and ip (package iproute2): {error}"
    return None if done.returncode == 0 else f"needs root and namespaces: {done.stderr.strip()}"


def hosts_refusal() -> str | None:
    """Why there can be no hosts here; None where there can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (packages openssh-server, openssh-client)"
    return refusal()


@dataclass
class Hosts:
    """Some hosts, which know each other's names; ssh's configuration `config` leads to their addresses, too."""

    folder: Path
    prefix: str
    config: Path
    addresses: dict[str, str]
    servers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def namespace(self, host: str) -> str:
        return f"{self.prefix}-{host}"

    def inside(self, host: str) -> list[str]:
        """What runs a command on a host."""
        enter = ["sh", str(self.folder / f"enter-{host}")]
        return ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts", *enter]

    def start_sshd(self, host: str) -> None:
        """Start the host's ssh server, and return when it listens."""
        log = self.folder / f"sshd-{host}.log"
        sshd = f"/usr/sbin/sshd -D -f {self.folder}/sshd-{host}.conf -E {log}"
        self.servers[host] = subprocess.Popen([*self.inside(host), *sshd.split()])
        deadline = time.monotonic() + 30
        while "Server listening" not in (log.read_text() if log.exists() else ""):
            if time.monotonic() > deadline or self.servers[host].poll() is not None:
                raise RuntimeError(f"sshd of {host} does not listen: {log.read_text()}")
            time.sleep(0.05)

    def set_wire(self, host: str, state: str) -> None:
        """Pull a host's plug ("down"), or put it in ("up")."""
        _ip(f"-n {self.namespace(host)} link set eth0 {state}")

    def processes(self, host: str, words: str) -> list[int]:
        """Processes of a host whose command line has these words."""
        found = []
        for pid in map(int, _ip(f"netns pids {self.namespace(host)}").split()):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words in line:
                    found.append(pid)
        return found


def _ip(words: str) -> str:
    return subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def wired_hosts(names: Sequence[str] = ("a", "b"), *, servers: bool = True) -> Iterator[Hosts]:
    """Make them, with an sshd each if `servers`, and take everything down at the end."""
    prefix = f"zk{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="zerokit-hosts-"))
    addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
    hosts = Hosts(folder, prefix, folder / "ssh.conf", addresses)
    try:
        if servers:
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
            Path("/run/sshd").mkdir(exist_ok=True)  # Debian's sshd separates its privileges there
        for host in (HUB, *addresses):
            _ip(f"netns add {hosts.namespace(host)}")
        known = "".join(f"{address} {host}\n" for host, address in addresses.items())
        hub = hosts.namespace(HUB)
        _ip(f"-n {hub} link add bridge type bridge")
        _ip(f"-n {hub} link set bridge up")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        lines = []
        for host, address in addresses.items():
            namespace = hosts.namespace(host)
            (folder / f"hosts-{host}").write_text(f"127.0.0.1 localhost\n{known}")
            # `ip netns exec` has given the process mounts of its own.
            bind = f"mount --bind {hosts.config} /etc/ssh/ssh_config\n" if servers else ""
            (folder / f"enter-{host}").write_text(
                f'hostname {host}\nmount --bind {folder}/hosts-{host} /etc/hosts\n{bind}exec "$@"\n'
            )
            _ip(f"-n {hub} link add to-{host} type veth peer name eth0 netns {namespace}")
            _ip(f"-n {hub} link set to-{host} master bridge up")
            _ip(f"-n {namespace} address add {address}/24 dev eth0")
            for device in ("eth0", "lo"):
                _ip(f"-n {namespace} link set {device} up")
            (folder / f"sshd-{host}.conf").write_text(
                f"ListenAddress {address}\nPort 22\nHostKey {folder / 'key'}\nPidFile none\nUsePAM no\n"
                f"AuthorizedKeysFile {folder / 'key.pub'}\nPermitRootLogin yes\nStrictModes no\n"
                f"SetEnv PATH={path} PYTHONPATH={ROOT}\n"  # zerokit is installed
            )
            lines.append(f"Host {host}\n  HostName {address}\n")
        hosts.config.write_text(
            f"{''.join(lines)}Host *\n  User root\n  IdentityFile {folder / 'key'}\n  IdentitiesOnly yes\n"
            f"  StrictHostKeyChecking no\n  UserKnownHostsFile {folder / 'known_hosts'}\n  LogLevel ERROR\n"
        )
        for host in addresses if servers else ():
            hosts.start_sshd(host)
        yield hosts
    finally:
        for host in (HUB, *addresses):
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in map(int, _ip(f"netns pids {hosts.namespace(host)}").split()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
                _ip(f"netns delete {hosts.namespace(host)}")
        for server in hosts.servers.values():
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)
