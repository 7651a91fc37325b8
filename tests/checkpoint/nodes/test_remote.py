"""Directories on other machines: what comes over ssh, what is said where it does not, and that nothing stays behind.

Most tests have a program called ssh that runs its line here, in a folder that stands for the other machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerokit
from tests.support.checkpoints import example_content, example_layout, flip, write_run
from tests.support.dealt import contents, deal
from tests.support.namespaces import ROOT, Hosts, wired_hosts
from zerokit.checkpoint.nodes.remote import host_and_path
from zerokit.checkpoint.verify import verify_all
from zerokit.errors import CheckpointError, MissingPath, UsageError

SSH = """#!/bin/sh
while [ "$1" != -- ]; do echo "$1" >> "$MACHINES/asked"; shift; done
case $2 in
  nowhere) echo "ssh: Could not resolve hostname nowhere: Name or service not known" >&2; exit 255;;
  closed) echo "me@closed: Permission denied (publickey)." >&2; exit 255;;
  silent) echo $$ > "$MACHINES/silent"; sleep 1000 & wait; exit 255;;
esac
echo "$2" >> "$MACHINES/calls"
cd "$MACHINES/$2" && HOME=$PWD && exec sh -c "$3"
"""


@pytest.fixture
def machines(tmp_path: Path, step: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of machines; each of the four nodes has its run as local/run."""
    folder = tmp_path / "machines"
    for number, run in enumerate(deal(step, tmp_path / "dealt", nodes=4)):
        shutil.move(run, folder / f"node-{number}" / "local" / "run")
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(SSH)
    (folder / "bin" / "ssh").chmod(0o755)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("MACHINES", str(folder))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(tmp_path)
    return folder


NODES = [f"node-{number}:local/run" for number in range(4)]


def require_nothing_left(folder: Path) -> None:
    """No temporary directory beside an output, nor where temporary files go."""
    assert [path.name for path in folder.iterdir() if ".tmp-" in path.name] == []
    assert list((folder / "temporary").iterdir()) == []


def test_what_is_elsewhere_and_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text, expected in (
        ("node-0:/local/run", ("node-0", "/local/run")),
        ("me@node-0.cluster:run", ("me@node-0.cluster", "run")),
        ("[::1]:/run", ("[::1]", "/run")),
        ("node-0:", ("node-0", ".")),
        ("node-0:/a:b", ("node-0", "/a:b")),
        (Path("node-0:/local/run"), ("node-0", "/local/run")),
        (r"C:\run", None),
        ("C:/run", None),
        ("s3://bucket/run", None),
        ("run", None),
        ("./node-0:/run", None),
        ("/runs/node-0:/run", None),
        ("-oProxyCommand=x:/run", None),
        ("-l:/run", None),
        ("$(touch):/run", None),
        ("a b:/run", None),
    ):
        assert host_and_path(text) == expected, text
    (tmp_path / "node-0:" / "run").mkdir(parents=True)
    assert host_and_path("node-0:/run") is None
    assert host_and_path("node-0:/other") == ("node-0", "/other")


def test_every_tool_takes_other_machines(step: Path, machines: Path, tmp_path: Path) -> None:
    done = zerokit.gather([NODES[1], machines / "node-3" / "local" / "run"], "out")
    assert contents(tmp_path / "out") == contents(step.parent)
    assert (done.notes, done.mended) == ((), ())
    zerokit.reshard(NODES[:3], 3, "three")
    zerokit.reshard(step.parent, 3, "expected")
    assert contents(tmp_path / "three") == contents(tmp_path / "expected")
    zerokit.consolidate([f"{node}/{step.name}" for node in NODES], "weights")
    assert zerokit.diff("weights", step).same

    alone = zerokit.inspect(NODES[0])
    assert (str(alone.path), alone.run) == (f"{NODES[0]}/{step.name}", None)
    assert alone.nodes[0].path == f"{NODES[0]}/{step.name}"
    assert "node 1 wrote them, nodes 1 and 2 have them" in alone.missing
    assert zerokit.inspect(NODES).missing == ""
    report = zerokit.verify(NODES)
    assert (report.intact, str(report.path)) == (True, f"{NODES[0]}/{step.name}")
    assert not zerokit.verify(NODES[0]).intact
    require_nothing_left(tmp_path)
    asked = (machines / "asked").read_text()
    for option in ("BatchMode=yes", "ConnectTimeout=30", "ServerAliveInterval=5", "ServerAliveCountMax=3"):
        assert option in asked


def test_what_is_here_does_not_come(machines: Path, tmp_path: Path, step: Path) -> None:
    here = [machines / f"node-{number}" / "local" / "run" for number in (0, 2)]
    zerokit.gather([*NODES, *here], "out")
    assert contents(tmp_path / "out") == contents(step.parent)
    assert (machines / "calls").read_text().split() == [
        name for node in NODES for name in [node.split(":")[0]] * 2
    ]


def test_an_ordinary_run_comes_too(step: Path, machines: Path, tmp_path: Path) -> None:
    for number in range(101, 107):
        content = example_content(example_layout(1), step=number)
        write_run(machines / "shared" / "run", example_layout(8), content)
    zerokit.gather("shared:run", "out")
    newest = contents(machines / "shared" / "run")
    expected = {name: whole for name, whole in newest.items() if name.startswith(("step-00000106", "latest"))}
    assert contents(tmp_path / "out") == expected
    assert [report.step for report in verify_all("shared:run")] == [103, 104, 105, 106]
    assert all(report.intact for report in verify_all("shared:run"))


def test_inspect_fetches_small_files_alone(machines: Path, step: Path) -> None:
    """Files of ranks are not read there: they may even be unreadable."""
    before = zerokit.inspect(NODES)
    for number in range(4):
        for path in (machines / f"node-{number}" / "local" / "run" / step.name).glob("rank-*"):
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
    assert zerokit.inspect(NODES) == before


def test_damage_on_other_machines_is_mended_and_named(machines: Path, step: Path, tmp_path: Path) -> None:
    for number, name in ((0, "rank-00000-of-00008.safetensors"), (2, "common.safetensors")):
        flip(machines / f"node-{number}" / "local" / "run" / step.name / name, -9)
    flip(machines / "node-0" / "local" / "run" / step.name / "common.safetensors", -9)
    done = zerokit.gather(NODES, "out")
    assert contents(tmp_path / "out") == contents(step.parent)
    assert done.mended[0].startswith(f"{NODES[0]}/{step.name}: rank-00000-of-00008.safetensors: ")
    assert done.mended[0].endswith(f": taken from {NODES[1]}")
    files = [finding.file for finding in zerokit.verify(NODES).findings]
    assert f"{NODES[0]}/{step.name}/rank-00000-of-00008.safetensors" in files
    assert f"{NODES[2]}/{step.name}/common.safetensors" in files
    flip(machines / "node-1" / "local" / "run" / step.name / "rank-00000-of-00008.safetensors", -9)
    with pytest.raises(CheckpointError) as caught:
        zerokit.gather(NODES, "again")
    assert f"in every directory that has it ({NODES[0]} and {NODES[1]})" in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
    require_nothing_left(tmp_path)


def test_hosts_that_do_not_answer_are_named(
    machines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, message in (
        (
            "nowhere:/run",
            "nowhere:/run: nowhere cannot be reached: ssh: Could not resolve .*: check the host's name",
        ),
        (
            "closed:/run",
            r"closed cannot be reached: .*Permission denied .*: give this user's key .*ssh-copy-id",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            zerokit.gather([*NODES, path], "out")
    with pytest.raises(MissingPath, match="node-0:local/nix: no such directory on node-0"):
        zerokit.inspect("node-0:local/nix")
    with pytest.raises(CheckpointError, match="node-0:local: no step that is complete"):
        zerokit.verify("node-0:local")
    with pytest.raises(UsageError, match="is on another machine: make a run of it here with zerokit gather"):
        zerokit.diff(NODES[0], "out")
    with pytest.raises(UsageError, match="name the output"):
        zerokit.reshard(NODES[0], 2)
    require_nothing_left(tmp_path)
    shutil.rmtree(machines / "bin")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"ssh cannot be run \(No such file or directory\): install"):
        zerokit.inspect(NODES)


def test_names_are_never_commands(step: Path, machines: Path, tmp_path: Path) -> None:
    for name in ("a b", "$(touch evil)", "`touch evil`", "; touch evil;", "'\"", "-rf", "*", "~"):
        place = machines / "odd" / name
        shutil.copytree(machines / "node-1" / "local" / "run", place)
        given = f"odd:{place}"
        zerokit.gather([given, NODES[3]], tmp_path / "out", force=True)
        assert contents(tmp_path / "out") == contents(step.parent)
    odd = machines / "odd" / "a b" / step.name
    for name in ("$(touch evil)", "rank-00000-of-00008.safetensors\n..", "../x"[3:] + "\nstep-00000999"):
        (odd / name).touch()
    (odd.parent / "step-00000101\n").mkdir()
    (odd.parent / "step-00000102; touch evil").mkdir()
    zerokit.gather([f"odd:{odd.parent}", NODES[3]], tmp_path / "out", force=True)
    assert contents(tmp_path / "out") == contents(step.parent)
    assert list(machines.rglob("evil")) == [] == list(tmp_path.glob("evil"))


@pytest.mark.full(default=["gather-2", "inspect-15"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["gather", "inspect", "verify"])
def test_a_signal_leaves_nothing(machines: Path, tmp_path: Path, command: str, number: int) -> None:
    output = ["-o", "out"] if command == "gather" else []
    with subprocess.Popen(
        [sys.executable, "-m", "zerokit", command, *NODES[:2], "silent:run", *output],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        mark = machines / "silent"
        while not (mark.exists() and mark.read_text()):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == 128 + number
    assert "interrupted by SIG" in errors
    require_nothing_left(tmp_path)
    assert not Path(f"/proc/{int(mark.read_text())}").exists()
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_told_before_anything_comes(
    machines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def full(path: os.PathLike[str]) -> os.statvfs_result:
        return os.statvfs_result((*real(path)[:4], 0, *real(path)[5:10]))

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(
        CheckpointError, match="bytes are to come from node-0:local/run, 0 are free: make room"
    ):
        zerokit.gather(NODES, "out")
    require_nothing_left(tmp_path)


def test_what_changes_there_meanwhile_is_noticed(
    machines: Path, step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file grows, shrinks or goes after the listing."""
    path = machines / "node-1" / "local" / "run" / step.name / "rank-00000-of-00008.safetensors"
    whole = path.read_bytes()
    (machines / "bin" / "cat").write_text(
        '#!/bin/sh\ncase $2 in *rank-00000*) sh -c "$CHANGE";; esac\nexec /bin/cat "$@"\n'
    )
    (machines / "bin" / "cat").chmod(0o755)
    for change, message in (
        (f"rm {path}", "cannot be read there: .*No such file"),
        (f"truncate -s 100 {path}", "sent .* bytes instead of"),
        (f"truncate -s 999999 {path}", "more came than its size|damaged"),
    ):
        monkeypatch.setenv("CHANGE", change)
        with pytest.raises(CheckpointError, match=message):
            zerokit.gather([NODES[1], NODES[3]], "out")
        path.write_bytes(whole)
    require_nothing_left(tmp_path)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with wired_hosts(("one", "two")) as made:
        yield made


@pytest.mark.full(default="*")  # a cluster in the default tier
@pytest.mark.sshd
def test_real_machines(step: Path, tmp_path: Path, hosts: Hosts, nodes: list[Path]) -> None:
    """Both see this machine's files, but a path with a host is only looked at over ssh."""
    command = [*hosts.inside("one"), sys.executable, "-m", "zerokit"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    done = run("gather", f"two:{nodes[1]}", f"root@one:{nodes[3]}", "-o", "out")
    assert (done.returncode, done.stdout) == (0, "out\n"), done.stderr
    assert contents(tmp_path / "out") == contents(step.parent)
    done = run("verify", f"two:{nodes[1]}", f"two:{nodes[2]}")
    assert done.returncode == 1
    assert "files of ranks 6 and 7 are missing: node 3 wrote them, nodes 0 and 3 have them" in done.stdout
    done = run("inspect", f"three:{nodes[1]}")
    assert done.returncode == 1
    assert "three cannot be reached: " in done.stderr
    assert [path.name for path in tmp_path.iterdir() if ".tmp-" in path.name] == []
