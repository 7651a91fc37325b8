"""`--launcher ssh` between two hosts, which are network namespaces with an sshd each: how it fails.

How it works is in `test_cluster_page`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.clusters import ROOT, SHORT, ZEROKIT
from tests.launch.ranks import all_ended, started, wait_for
from tests.support.namespaces import Hosts, wired_hosts

pytestmark = pytest.mark.sshd


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with wired_hosts() as made:
        yield made


@pytest.fixture(autouse=True)
def _zerokit_is_found_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)


def everything(hosts: Hosts, host: str) -> list[int]:
    """What a launch may have started there."""
    modules = [f"{package}.{room}." for package in ("zerokit", "tests") for room in ("launch", "cluster")]
    return [pid for module in modules for pid in hosts.processes(host, module)]


def left_over(hosts: Hosts) -> list[int]:
    return [
        pid for host in ("a", "b") for pid in everything(hosts, host) + hosts.processes(host, "-m zerokit ")
    ]


def require_nothing_left(hosts: Hosts, seconds: float = 60.0) -> None:
    wait_for(lambda: not left_over(hosts), seconds)


@pytest.mark.parametrize(
    ("names", "options", "node", "remedy"),
    [
        ("a,nowhere.invalid", [], "node 1 on nowhere.invalid", "Could not resolve hostname"),
        ("a,b", ["--remote-python", "/nowhere/python"], "node 0 on a", "--remote-python"),
        ("a,b", ["--ssh-option", "-o PubkeyAuthentication=no"], "node 0 on a", "ssh-copy-id"),
        ("a,10.77.0.9", [], "node 1 on 10.77.0.9", "port 22: "),
    ],
)
def test_a_host_that_cannot_serve_is_named_with_the_remedy(
    hosts: Hosts, names: str, options: list[str], node: str, remedy: str
) -> None:
    """To a user on host a."""
    there = ["--launcher", "ssh", "--hosts", names, "--connect-timeout", "20", *options]
    words = [*hosts.inside("a"), *ZEROKIT, *SHORT, "--no-mlflow", *there]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 1
    record = json.loads(done.stdout)
    assert record["status"] == "failed"
    assert node in record["reason"]
    assert remedy in record["reason"]
    require_nothing_left(hosts)


LAUNCHER = """
import sys
from pathlib import Path
from tests.cluster.test_remote import run
from zerokit.cluster.ssh import ssh_address, ssh_host
config, python, folder = sys.argv[1:]
options = ("-F", config, "-o", "ServerAliveInterval=2")
(logs := Path(folder, "logs")).mkdir()
hosts = [ssh_host(name, options, python, 30.0) for name in "ab"]
run(Path(folder), logs, "wait", *hosts, master_addr=ssh_address("a", options))
"""


@pytest.fixture
def launcher(hosts: Hosts, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A launcher on host a, once ranks that wait run on both hosts. Its output says what became of it."""
    python = tmp_path / "hasty-python"
    python.write_text(f'#!/bin/sh\nshift 3; exec {sys.executable} -m tests.cluster.hasty_node "$@"\n')
    python.chmod(0o755)
    words = ["-c", LAUNCHER, str(hosts.config), str(python), str(tmp_path)]
    with subprocess.Popen(
        [*hosts.inside("a"), sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            wait_for(lambda: process.poll() is not None or len(started(tmp_path)) == 2)
            assert process.poll() is None, process.communicate()
            for rank, host in enumerate(("a", "b")):
                pids = [one["pid"] for _, one in sorted(started(tmp_path).items())]
                assert [pid in everything(hosts, host) for pid in pids] == [rank == 0, rank == 1]
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    require_nothing_left(hosts, 60.0)
    assert all_ended(tmp_path)


def test_a_killed_sshd_is_a_lost_node(hosts: Hosts, launcher: subprocess.Popen[str]) -> None:
    for pid in hosts.processes("b", "sshd"):
        os.kill(pid, signal.SIGKILL)
    hosts.servers["b"].wait()
    _, said = launcher.communicate(timeout=800)
    hosts.start_sshd("b")
    assert "node 1 on b was lost" in said


def test_a_wire_that_is_cut_is_a_lost_node(hosts: Hosts, launcher: subprocess.Popen[str]) -> None:
    hosts.set_wire("b", "down")
    try:
        _, said = launcher.communicate(timeout=800)
        # The ranks there hear nothing of their launcher: they end while the wire is still cut.
        wait_for(lambda: not everything(hosts, "b"), 60.0)
    finally:
        hosts.set_wire("b", "up")
    assert "node 1 on b" in said


def test_a_killed_launcher_leaves_nothing(hosts: Hosts, launcher: subprocess.Popen[str]) -> None:
    for pid in hosts.processes("a", "tests.cluster.test_remote"):
        os.kill(pid, signal.SIGKILL)
    launcher.communicate(timeout=800)
    require_nothing_left(hosts, 40.0)
