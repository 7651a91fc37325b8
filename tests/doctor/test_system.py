"""Faults of a system, made for real in namespaces of their own: the command must find them by itself."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import environment

QUICK = f"{shlex.quote(sys.executable)} -m zerokit doctor --quick --json disk"


_MOUNT, _NET = "--mount", "--net"
_WIRE = "ip link set lo up; ip link add wire0 type veth peer name wire1; ip addr add 10.77.0.1/24 dev wire0;"
_SHM = "mount -t tmpfs -o size=32m none /dev/shm; head -c 40M /dev/zero > /dev/shm/full 2>/dev/null || true"
_FULL = "mount -t tmpfs -o size=8m none disk; head -c 20M /dev/zero > disk/full 2>/dev/null || true"
_INODES = "mount -t tmpfs -o size=200m,nr_inodes=2 none disk; touch disk/one"
_READ_ONLY = "mount -t tmpfs none disk; mount -o remount,ro disk"
_SMALL_MTU = f"{_WIRE} ip link set wire0 mtu 600 up; ip link set wire1 up"
_NAMELESS = "ip link set lo up; hostname nowhere-to-be-found"
_LONG_NAME = f"ip link set lo up; hostname {'a' * 64}"
_STORE = (
    f"mount -t tmpfs none disk; {shlex.quote(sys.executable)} -c 'import sqlite3;"
    'sqlite3.connect("disk/runs.db").execute("CREATE TABLE t (a)")\'; mount -o remount,ro disk'
)

# In which namespaces, with which variable, after what; what is found then, by check.
FAULTS: list[tuple[str, str, str, dict[str, str]]] = [
    (_MOUNT, "", _SHM, {"ZD401": "fault: 0.0 MiB free of 32.0 MiB"}),
    (_MOUNT, "", "mount -t tmpfs -o size=64m none /dev/shm", {"ZD401": "warning: 64.0 MiB free of 64.0 MiB"}),
    (_MOUNT, "", _FULL, {"ZD601": "fault: disk: No space left on device", "ZD602": "fault: 0.0 MiB free in "}),
    (_MOUNT, "", _INODES, {"ZD601": "fault: disk: No space left on device", "ZD602": "fault: no inode is left"}),
    (_MOUNT, "", _READ_ONLY, {"ZD601": "fault: disk: Read-only file system"}),
    (_MOUNT, "MLFLOW_TRACKING_URI=sqlite:///disk/runs.db", _STORE, {"ZD803": "fault: ", "ZD601": "fault: "}),
    ("", "", "ulimit -n 128; ulimit -l 64", {"ZD402": "warning: at most 0.1 MiB", "ZD403": "warning: at most 128"}),
    ("", "NCCL_SOCKET_IFNAME=warp9", "", {"ZD302": "fault: no such interface", "ZD301": "ok: "}),
    (_NET, "", "", {"ZD301": "fault: no interface is up"}),
    (_NET, "GLOO_SOCKET_IFNAME=wire0", _WIRE, {"ZD301": "fault: is down"}),
    (_NET, "NCCL_SOCKET_IFNAME=wire0", _WIRE, {"ZD302": "fault: is down"}),
    (_NET, "GLOO_SOCKET_IFNAME=wire0", _SMALL_MTU, {"ZD305": "warning: 600 on wire0", "ZD301": "ok: "}),
    # A network namespace too: without it a name server could take its time.
    ("--uts --net", "", _NAMELESS, {"ZD303": "warning: it cannot be looked up"}),
    ("--uts --net", "", _LONG_NAME, {"ZD303": "warning: it cannot be looked up"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("namespace", "variable", "script", "expected"),
    [pytest.param(*fault, marks=[pytest.mark.netns] if fault[0] else []) for fault in FAULTS],
)
def test_a_fault_is_found(
    tmp_path: Path, namespace: str, variable: str, script: str, expected: dict[str, str]
) -> None:
    (tmp_path / "disk").mkdir()
    variables = dict([variable.split("=")]) if variable else {}
    prefix = ["unshare", *namespace.split()] if namespace else []
    done = subprocess.run(
        [*prefix, "bash", "-c", f"set -e; {script}\n{QUICK}"],
        cwd=tmp_path,
        env=environment(tmp_path, **variables),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == (5 if "fault: " in " ".join(expected.values()) else 0), done.stderr
    order = ["ok", "skipped", "warning", "fault"]
    findings = sorted(json.loads(done.stdout)["findings"], key=lambda one: order.index(one["severity"]))
    found = {one["code"]: one for one in findings}  # the worst of each check
    for check, text in expected.items():
        severity, _, said = text.partition(": ")
        assert found[check]["severity"] == severity, found[check]
        assert said in found[check]["found"]
