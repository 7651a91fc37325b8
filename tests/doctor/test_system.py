"""Faults of a system, made for real in namespaces of their own: the command must find them by itself."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import environment

QUICK = f"{shlex.quote(sys.executable)} -m zerokit.cli doctor --quick --json"


def doctor(
    folder: Path, script: str, *namespaces: str, command: str = QUICK, **variables: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the worst finding of each check, of `command` after `script` in new namespaces."""
    prefix = ["unshare", *namespaces] if namespaces else []
    done = subprocess.run(
        [*prefix, "bash", "-c", f"set -e; {script}\n{command}"],
        cwd=folder,
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 5), done.stderr
    worst: dict[str, dict[str, Any]] = {}
    order = ["ok", "skipped", "warning", "fault"]
    for one in json.loads(done.stdout)["findings"]:
        before = worst.get(one["code"])
        if before is None or order.index(one["severity"]) > order.index(before["severity"]):
            worst[one["code"]] = one
    return done.returncode, worst


def judged(found: dict[str, Any]) -> tuple[str, str]:
    return found["severity"], found["found"]


@pytest.mark.netns
def test_a_full_dev_shm(tmp_path: Path) -> None:
    script = (
        "mount -t tmpfs -o size=32m none /dev/shm; head -c 40M /dev/zero > /dev/shm/full 2>/dev/null || true"
    )
    code, found = doctor(tmp_path, script, "--mount")
    assert (code, judged(found["ZD401"])) == (5, ("fault", "0.0 MiB free of 32.0 MiB"))


@pytest.mark.netns
def test_a_small_dev_shm_is_a_warning(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, "mount -t tmpfs -o size=64m none /dev/shm", "--mount")
    assert judged(found["ZD401"]) == ("warning", "64.0 MiB free of 64.0 MiB")
    assert code == 0


@pytest.mark.netns
def test_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    script = "mount -t tmpfs -o size=8m none disk; head -c 20M /dev/zero > disk/full 2>/dev/null || true"
    code, found = doctor(tmp_path, script, "--mount", command=f"{QUICK} disk")
    assert code == 5
    assert judged(found["ZD601"]) == ("fault", f"{tmp_path}/disk: No space left on device")
    assert judged(found["ZD602"]) == ("fault", f"0.0 MiB free in {tmp_path}/disk")


@pytest.mark.netns
def test_a_disk_without_inodes(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    script = "mount -t tmpfs -o size=200m,nr_inodes=2 none disk; touch disk/one"
    code, found = doctor(tmp_path, script, "--mount", command=f"{QUICK} disk")
    assert code == 5
    assert judged(found["ZD601"]) == ("fault", f"{tmp_path}/disk: No space left on device")
    assert judged(found["ZD602"]) == ("fault", "no inode is left")


@pytest.mark.netns
def test_a_read_only_directory(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    script = "mount -t tmpfs none disk; mount -o remount,ro disk"
    code, found = doctor(tmp_path, script, "--mount", command=f"{QUICK} disk/run/3")
    assert (code, judged(found["ZD601"])) == (5, ("fault", f"{tmp_path}/disk: Read-only file system"))


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    code, found = doctor(tmp_path, "", command=f"{QUICK} run")
    assert (code, judged(found["ZD601"])) == (5, ("fault", f"{tmp_path}/run: Not a directory"))


def test_low_limits(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, "ulimit -n 128; ulimit -l 64")
    assert code == 0
    assert judged(found["ZD402"]) == ("warning", "at most 0.1 MiB")
    assert judged(found["ZD403"]) == ("warning", "at most 128")


@pytest.mark.netns
def test_a_host_name_that_cannot_be_looked_up(tmp_path: Path) -> None:
    # A network namespace too: without it a name server could take its time.
    script = "ip link set lo up; hostname nowhere-to-be-found"
    _, found = doctor(tmp_path, script, "--uts", "--net")
    assert found["ZD303"]["severity"] == "warning"
    assert found["ZD303"]["found"].startswith("nowhere-to-be-found cannot be looked up: ")
    assert found["ZD301"]["found"] == "the host's own name resolves to no address, which no interface has"


@pytest.mark.parametrize(
    ("variable", "code"), [("GLOO_SOCKET_IFNAME", "ZD301"), ("NCCL_SOCKET_IFNAME", "ZD302")]
)
def test_an_interface_that_does_not_exist(tmp_path: Path, variable: str, code: str) -> None:
    status, found = doctor(tmp_path, "", **{variable: "warp9"})
    assert status == 5
    assert found[code]["severity"] == "fault"
    assert "no such interface" in found[code]["found"]
    assert found["ZD301" if code == "ZD302" else "ZD302"]["severity"] != "fault"


_WIRE = "ip link set lo up; ip link add wire0 type veth peer name wire1; ip addr add 10.77.0.1/24 dev wire0;"


@pytest.mark.netns
@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_is_down(tmp_path: Path, variable: str) -> None:
    status, found = doctor(tmp_path, _WIRE, "--net", **{variable: "wire0"})
    code = "ZD301" if variable.startswith("GLOO") else "ZD302"
    assert (status, found[code]["severity"]) == (5, "fault")
    assert "is down" in found[code]["found"]


@pytest.mark.netns
def test_a_small_mtu(tmp_path: Path) -> None:
    script = f"{_WIRE} ip link set wire0 mtu 600 up; ip link set wire1 up"
    _, found = doctor(tmp_path, script, "--net", GLOO_SOCKET_IFNAME="wire0")
    assert judged(found["ZD305"]) == ("warning", "600 on wire0")
    assert found["ZD301"]["severity"] == "ok"
    _, found = doctor(tmp_path, script.replace("600", "1500"), "--net", GLOO_SOCKET_IFNAME="wire0")
    assert judged(found["ZD305"]) == ("ok", "1500 on wire0")


@pytest.mark.netns
def test_a_port_of_infiniband_that_is_down(tmp_path: Path) -> None:
    """The kernel's folder is covered by one with a device, for there is none in most machines."""
    script = (
        "mount -t tmpfs none /sys/class; mkdir -p /sys/class/infiniband/mlx5_0/ports/1;"
        "echo '1: DOWN' > /sys/class/infiniband/mlx5_0/ports/1/state; ulimit -l 8192"
    )
    _, found = doctor(tmp_path, script, "--mount")
    assert judged(found["ZD306"]) == ("warning", "mlx5_0 port 1 DOWN")
    assert judged(found["ZD402"]) == ("warning", "at most 8.0 MiB")
    assert "ibv_reg_mr" in found["ZD402"]["meaning"]


def test_pinned_to_a_core_with_others(tmp_path: Path) -> None:
    """The facts by themselves: what two ranks there would get is judged in test_judging."""
    done = subprocess.run(
        [
            *("taskset", "-c", "0", sys.executable, "-c"),
            "from zerokit.doctor.processor import look_at_processor as look; print(look().allowed)",
        ],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[0]\n"
