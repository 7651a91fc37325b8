"""Commands and functions that read checkpoints, on one node's directory and on several."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import zerokit
from tests.cli.commands import zerokit as command
from tests.support.checkpoints import example_content, example_layout, flip, write_run
from tests.support.dealt import contents, deal
from zerokit.checkpoint.nodes.record import NODE_NAME
from zerokit.checkpoint.verify import verify_all
from zerokit.errors import CheckpointError, UsageError

LACK = (
    "files of ranks 2 and 3 are missing: node 1 wrote them, nodes 1 and 2 have them; files of ranks 4 and 5 are "
    "missing: node 2 wrote them, nodes 2 and 3 have them"
)
"""What node 0 does not have."""


def test_inspect_says_what_a_node_has(step: Path, nodes: list[Path]) -> None:
    alone = zerokit.inspect(nodes[0])
    (node,) = alone.nodes
    assert (node.node, node.nodes, node.ranks, node.copies, node.lacks) == (0, 4, (0, 1), (6, 7), ())
    assert alone.missing == LACK
    assert alone.run is not None
    assert [(one.name, one.incomplete, one.damaged) for one in alone.run.steps] == [(step.name, LACK, "")]
    whole = zerokit.inspect(step.parent)
    assert (whole.nodes, whole.missing, alone.notes) == ((), "", ())
    assert (alone.step, alone.world, alone.streams, alone.common) == (100, 8, whole.streams, whole.common)
    ranks = [int(file.name[5:10]) for file in alone.files if file.name.startswith("rank-")]
    assert ranks == [0, 1, 6, 7]
    both = zerokit.inspect([nodes[0], nodes[2] / step.name])
    assert (both.missing, both.files, both.bytes, both.run) == ("", whole.files, whole.bytes, None)
    assert [one.ranks for one in both.nodes] == [(0, 1), (4, 5)]
    (nodes[0] / step.name / "rank-00001-of-00008.safetensors").unlink()
    (nodes[2] / step.name / NODE_NAME).write_bytes(b"half")
    both = zerokit.inspect([nodes[0], nodes[2]])
    assert both.nodes[0].lacks == ("rank-00001-of-00008.safetensors",)
    assert both.nodes[1].node is None
    assert "though" in both.missing
    assert f"{nodes[2] / step.name / NODE_NAME}: damaged" in both.notes[0]


def test_verify_reads_every_copy_and_says_what_is_nowhere(step: Path, nodes: list[Path]) -> None:
    alone = zerokit.verify(nodes[0])
    assert (alone.intact, alone.findings, alone.missing) == (False, (), LACK)
    every = zerokit.verify(nodes)
    assert (every.intact, every.step, every.world) == (True, 100, 8)
    sizes = {path.name: path.stat().st_size for path in step.iterdir() if path.name != "manifest.json"}
    ranks = sum(size for name, size in sizes.items() if name.startswith("rank-"))
    assert every.bytes_read == 2 * ranks + 4 * (sum(sizes.values()) - ranks)
    name = "rank-00006-of-00008.safetensors"
    flip(nodes[3] / step.name / name, 4100)
    path = nodes[0] / step.name / "rank-00000-of-00008.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (nodes[1] / step.name / NODE_NAME).write_bytes(b"{}")
    (nodes[2] / step.name / "strange").touch()
    (nodes[2] / step.name / "extra.json").unlink()
    flip(nodes[2] / step.name / "manifest.json", 100)
    findings = zerokit.verify(nodes).findings
    found = {finding.file: finding for finding in reversed(findings)}
    assert found[str(nodes[3] / step.name / name)].stream == "master"
    assert "truncated" in found[str(path)].problem
    assert "cannot be opened: No such file" in found[str(nodes[2] / step.name / "extra.json")].problem
    assert "move it away" in found[str(nodes[2] / step.name / "strange")].problem
    told = [finding.problem for finding in findings if not finding.file]
    assert [Path(text.split(":")[0]).parts[-3:] for text in told] == [
        ("node-1", step.name, NODE_NAME),
        ("node-2", step.name, "manifest.json"),
    ]
    assert not zerokit.verify(nodes).missing


def test_verify_all_reads_every_step(nodes: list[Path], tmp_path: Path) -> None:
    newer = write_run(tmp_path / "newer", example_layout(8), example_content(example_layout(1), step=110))
    for old, new in zip(nodes, deal(newer, tmp_path / "later", nodes=4, saved=2000), strict=True):
        shutil.copytree(new, old, dirs_exist_ok=True)
    shutil.rmtree(nodes[3] / newer.name)
    assert [report.step for report in verify_all(nodes)] == [100, 110]


@pytest.mark.parametrize("tool", ["reshard", "convert", "consolidate"])
def test_outputs_are_those_of_the_ordinary_run(
    step: Path, nodes: list[Path], tmp_path: Path, tool: str
) -> None:
    def make(source: Any, output: Path) -> dict[str, bytes]:
        if tool == "reshard":
            zerokit.reshard(source, 3, output)
        elif tool == "consolidate":
            zerokit.consolidate(source, output)
        else:
            zerokit.convert(source, output, world=5)
        return contents(output)

    expected = make(step.parent, tmp_path / "expected")
    assert make([nodes[3], nodes[1]], tmp_path / "out") == expected
    # Whole files and headers are taken from where they are right.
    flip(nodes[1] / step.name / "common.safetensors", 4100)
    flip(nodes[1] / step.name / "extra.json", 3)
    flip(nodes[1] / step.name / "rank-00000-of-00008.safetensors", 9)
    with pytest.warns(
        zerokit.ZerokitWarning, match="common.safetensors: damaged: taken from another directory"
    ):
        assert make([nodes[1], nodes[3], nodes[0]], tmp_path / "again") == expected
    flip(nodes[1] / step.name / "rank-00001-of-00008.safetensors", 5000)
    refused: tuple[tuple[Path, str], ...] = (
        (tmp_path / "bad", "zerokit gather takes each slice from a directory where it is right"),
        (nodes[3] / "out", "the output lies in its source"),
    )
    for output, message in refused:
        with pytest.warns(zerokit.ZerokitWarning), pytest.raises(CheckpointError, match=message):
            make([nodes[1], nodes[3]], output)
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("place", ["run", "step"])
def test_a_part_is_refused_by_those_who_need_all(step: Path, nodes: list[Path], place: str) -> None:
    part = nodes[0] if place == "run" else nodes[0] / step.name
    message = (
        "files of ranks 4 and 5 are missing: node 2 wrote them, nodes 2 and 3 have them: name the direct"
    )
    for refused in (
        lambda: zerokit.reshard(part, 2, nodes[0].parent / "out"),
        lambda: zerokit.consolidate(part, nodes[0].parent / "out"),
        lambda: zerokit.convert(part, nodes[0].parent / "out", format="dcp"),
        lambda: zerokit.diff(part, step),
        lambda: zerokit.diff(step.parent, part),
        lambda: zerokit.Checkpoint(part),
        lambda: zerokit.reshard([part, nodes[1]], 2, nodes[0].parent / "out"),
    ):
        with pytest.raises(CheckpointError, match=message):
            refused()
    with pytest.raises(UsageError, match="name the output"):
        zerokit.reshard(nodes, 2)


def test_prune_keeps_what_a_node_may_need(step: Path, nodes: list[Path], tmp_path: Path) -> None:
    """Two generations stay, although no step is complete in one node's directory."""
    for number in (80, 90, 110):
        content = example_content(example_layout(1), step=number)
        write_run(tmp_path / f"run-{number}", example_layout(8), content)
        made = deal(tmp_path / f"run-{number}" / f"step-{number:08d}", tmp_path / str(number), nodes=4)
        shutil.copytree(made[0], nodes[0], dirs_exist_ok=True)
    pruning = zerokit.prune(nodes[0], keep_last=1)
    assert [one.path.name for one in pruning.removed] == ["step-00000080", "step-00000090"]
    assert (pruning.left, zerokit.list_steps(nodes[0])) == ((), [100, 110])
    with pytest.raises(CheckpointError, match="holds step-00000110, later than step 100"):
        zerokit.check_run(nodes[0], after=100)
    zerokit.check_run(nodes[0], after=110)


def test_commands_take_several_directories(step: Path, nodes: list[Path], tmp_path: Path) -> None:
    names = [node.name for node in nodes]
    done = command(tmp_path, "gather", *names, "-o", "out", "--json")
    plain = json.loads(done.stdout)
    assert (done.returncode, plain["output"], plain["mended"]) == (0, "out", [])
    assert contents(tmp_path / "out") == contents(step.parent)
    flip(nodes[0] / step.name / "rank-00000-of-00008.safetensors", 4100)
    done = command(tmp_path, "gather", *names, "-o", "out")
    assert (done.returncode, done.stdout) == (1, "")
    assert "out: exists: choose another output, or --force" in done.stderr
    done = command(tmp_path, "gather", *names, "-o", "out", "--force")
    assert (done.returncode, done.stdout) == (0, "out\n")
    assert "elements 0 to 9: damaged (CRC-32 " in done.stderr
    assert ": taken from node-1\n" in done.stderr
    assert contents(tmp_path / "out") == contents(step.parent)

    done = command(tmp_path, "verify", *names)
    assert done.returncode == 1
    assert (
        f"node-0/{step.name}/rank-00000-of-00008.safetensors: param/table, elements 0 to 9: damaged"
        in done.stdout
    )
    done = command(tmp_path, "verify", names[1], names[2])
    assert (done.returncode, "node-1/step-00000100: incomplete: step 100" in done.stdout) == (1, True)
    assert "files of ranks 6 and 7 are missing: node 3 wrote them, nodes 0 and 3 have them" in done.stdout
    done = command(tmp_path, "verify", names[1], names[3], "--json")
    plain = json.loads(done.stdout)
    assert (done.returncode, plain["intact"], plain["missing"]) == (0, True, "")

    done = command(tmp_path, "inspect", names[1], names[2])
    assert done.returncode == 0
    assert "node-2/step-00000100  node 2 of 4: ranks 4 and 5, copies of ranks 2 and 3\n" in done.stdout
    assert "incomplete  files of ranks 6 and 7 are missing: node 3 wrote them" in done.stdout
    plain = json.loads(command(tmp_path, "inspect", names[1], "--json").stdout)
    assert plain["nodes"][0]["copies"] == [0, 1]

    done = command(tmp_path, "reshard", names[1], names[3], "--to", "2", "-o", "two")
    assert (done.returncode, done.stdout) == (0, "two\n")
    done = command(tmp_path, "convert", names[1], names[3], "-o", "five", "--to", "5")
    assert (done.returncode, done.stdout) == (0, "five\n")
    assert command(tmp_path, "diff", "two", "five").returncode == 0
    done = command(tmp_path, "convert", *names[1:], "--to", "5")
    assert (done.returncode, "several directories have one output: name it with -o" in done.stderr) == (
        2,
        True,
    )
    done = command(tmp_path, "diff", "nobody:/local/run", "two")
    assert done.returncode == 2
    assert (
        "nobody:/local/run: is on another machine: make a run of it here with zerokit gather" in done.stderr
    )
