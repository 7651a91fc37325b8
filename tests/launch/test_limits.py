"""Ranks held to cores and memory: real control groups where they can be made, else the refusal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zerokit.interrupts import Interrupts
from zerokit.launch import limits
from zerokit.launch.failures import WorkerFailed
from zerokit.launch.limits import Limit, LimitError, Limits, missing, own_group
from zerokit.launch.local import launch

GIB = 2**30
BOTH = [Limit(1.0, 2 * GIB), Limit(0.5, None)]


def groups_left() -> list[Path]:
    """What this process has left."""
    places = {own_group(controller)[0] for controller in ("cpu", "memory")}
    return [group for place in places for group in place.glob(f"zerokit-{os.getpid()}-*")]


def group_of(pid: int, controller: str) -> str:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line.split(":", 2)[2] for line in lines if line.split(":")[1] in (controller, ""))


def test_processes_are_in_groups_of_their_own_that_are_gone_afterwards() -> None:
    if (reason := missing()) is not None:
        with pytest.raises(
            LimitError, match="it takes a control group inside which this user may make others"
        ):
            Limits(BOTH).__enter__()
        assert "ranks cannot be held to cores and memory here" in reason
        return
    command = [sys.executable, "-c", "input()"]
    with Limits(BOTH) as groups:
        for rank, limit in enumerate(BOTH):
            with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
                groups.put(rank, process.pid)
                assert group_of(process.pid, "cpu").endswith(f"-rank-{rank}")
                assert group_of(process.pid, "memory").endswith(f"-rank-{rank}") == bool(limit.memory_bytes)
                process.kill()
        groups.put(0, process.pid)  # one that has ended is left alone
    assert not groups_left()


def test_ranks_that_are_killed_or_fail_leave_no_group(tmp_path: Path, logs: Path) -> None:
    if missing() is not None:
        with pytest.raises(LimitError), Interrupts() as interrupts:
            launch("x", [], nodes=2, nproc_per_node=1, log_dir=logs, interrupts=interrupts, limits=BOTH)
        return
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "killed.py").write_text(code)
    with pytest.raises(WorkerFailed) as caught, Interrupts() as interrupts:
        launch(
            "killed",
            [],
            nodes=2,
            nproc_per_node=1,
            log_dir=logs,
            interrupts=interrupts,
            environment={"PYTHONPATH": str(tmp_path)},
            limits=BOTH,
        )
    assert -signal.SIGKILL in [one.exit_code for one in caught.value.failures]
    assert not groups_left()


def test_groups_of_a_killed_launcher_go_with_the_next_ones() -> None:
    if missing() is not None:
        assert not groups_left()
        return
    code = (
        "import os, signal\nfrom zerokit.launch.limits import Limit, Limits\n"
        "Limits([Limit(1.0)]).__enter__()\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    own, _ = own_group("cpu")
    assert killed.returncode == -signal.SIGKILL
    with Limits([Limit(1.0)]):
        mine = [group for group in own.glob("zerokit-*") if group.name.split("-")[1] == str(os.getpid())]
        others = [int(group.name.split("-")[1]) for group in own.glob("zerokit-*") if group not in mine]
        assert len(mine) == 1
        assert all(Path(f"/proc/{pid}").exists() for pid in others)


CGROUPS = "2:memory:/docker/a\n1:cpu,cpuacct:/docker/a\n"
MOUNTS = (
    "32 31 0:29 /docker/a /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def test_the_own_group_is_found_inside_and_outside_of_containers(tmp_path: Path) -> None:
    (proc := tmp_path / "proc/self").mkdir(parents=True)
    (proc / "cgroup").write_text(CGROUPS)
    (proc / "mountinfo").write_text(MOUNTS)
    groups = tmp_path / "sys/fs/cgroup"
    assert own_group("cpu", tmp_path) == (groups / "cpu", False)
    assert own_group("memory", tmp_path) == (groups / "memory/docker/a", False)
    (own := groups / "user" / "bench").mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu memory\n")
    (proc / "cgroup").write_text("0::/user/bench\n")
    (proc / "mountinfo").write_text("41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    assert own_group("memory", tmp_path) == (own, True)
    with pytest.raises(OSError, match="no control groups with the controller 'pids' are mounted"):
        own_group("pids", tmp_path)


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "/group"), OSError(30, "Read-only")]
)
def test_a_refusal_says_what_is_needed(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def refuse(controller: str) -> None:
        raise error

    monkeypatch.setattr(limits, "own_group", refuse)
    assert (missing() or "").endswith("systemd-run --user --scope --property=Delegate=yes")
    assert (error.strerror or "") in (missing() or "")


def test_a_group_of_version_2_gives_its_controllers_to_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With ordinary files in the place of the kernel's."""
    monkeypatch.setattr(limits, "own_group", lambda controller: (tmp_path, True))
    groups = Limits([Limit(0.5, GIB), Limit(2.0, None)]).__enter__()
    written = {
        str(path.relative_to(tmp_path)).split("-", 3)[-1]: path.read_text() for path in tmp_path.rglob("*.*")
    }
    assert written == {
        "launcher/cgroup.procs": str(os.getpid()),
        "cgroup.subtree_control": "+memory",
        "rank-0/cpu.max": "10000 20000",
        "rank-0/memory.max": str(GIB),
        "rank-1/cpu.max": "40000 20000",
    }
    groups.put(1, 77)
    (found,) = tmp_path.glob("*-rank-1/cgroup.procs")
    assert found.read_text() == "77"
