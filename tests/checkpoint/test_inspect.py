"""What the checkpoint commands show: contents, differences, refusals; names out of files cannot steer a terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.cli.commands import run_python
from tests.cli.inside import zerokit_inside as zerokit
from tests.support.checkpoints import (
    Content,
    example_content,
    example_extra,
    example_layout,
    weights_of,
    write_checkpoint,
    write_run,
)
from zerokit.checkpoint.diff import Difference, diff
from zerokit.checkpoint.formats import open_source
from zerokit.checkpoint.inspect import inspect
from zerokit.checkpoint.latest import Latest, write_latest
from zerokit.checkpoint.run import mark_superseded, stated_checksum
from zerokit.checkpoint.safetensors import Stream
from zerokit.layout import Layout, Parameter, Segment, build_layout
from zerokit.process import Process


def test_a_checkpoint_is_described(step: Path) -> None:
    summary = inspect(step.parent)
    layout = example_layout(3)
    assert (summary.path, summary.step, summary.world, summary.units) == (step, 100, 3, len(layout.units))
    assert summary.trainable_numel == layout.trainable_numel
    assert summary.frozen_numel == 4 * 24 * 7 + 9
    assert summary.bytes == sum(
        path.stat().st_size for path in step.iterdir() if path.name != "manifest.json"
    )
    assert [p.name for p in summary.parameters] == [p.name for p in layout.parameters]
    tied = summary.parameters[0]
    assert (tied.name, tied.aliases, tied.numel) == ("tok.weight", ("head.weight",), 1200)
    assert tied.streams == ("master", "exp_avg", "exp_avg_sq")
    assert {p.streams for p in summary.parameters if not p.trainable} == {("param",)}
    assert {tensor.name for tensor in summary.common} == {
        "buffers/count",
        "buffers/running_mean",
        "optimizer/step",
    }


def test_the_command_shows_a_tree_or_gives_json(step: Path, tmp_path: Path) -> None:
    done = zerokit(tmp_path, "inspect", "run")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("run/step-00000100  step 100, 3 ranks, ")
    assert "│   ├── master  float32, 14 parameters, 5,351 elements, 21.4 kB" in lines
    assert "│   │   └── weight  float32 [50, 24], tied with head.weight" in lines
    assert not any(line != line.rstrip() for line in lines)
    done = zerokit(tmp_path, "inspect", "--json", str(step))
    assert (done.returncode, done.stderr) == (0, "")
    plain = json.loads(done.stdout)
    assert (plain["step"], plain["world"], len(plain["files"])) == (100, 3, 5)
    assert plain["parameters"][0]["shape"] == [50, 24]


def test_layers_that_are_alike_are_shown_once(tmp_path: Path) -> None:
    segments = [
        Segment(f"h.{i}", (Parameter(f"h.{i}.w", (4, 4 + (i == 7))), Parameter(f"h.{i}.b", (4,))))
        for i in range(12)
    ]
    layout = build_layout(segments, world=2, bucket_bytes=64)
    write_checkpoint(tmp_path / "step", layout, example_content(layout))
    shown = zerokit(tmp_path, "inspect", "step").stdout
    assert [
        line.split("── ")[1] for line in shown.splitlines() if "alike" in line or line.endswith("── 7")
    ] == ["0 – 6 (7 alike)", "7", "8 – 11 (4 alike)"]


def test_a_run_tells_its_steps_and_what_is_not_finished(tmp_path: Path) -> None:
    layout, run = example_layout(1), tmp_path / "run"
    content = example_content(layout)
    for number in (1, 2, 3, 4, 5):
        one = replace(content, step=number)
        write_checkpoint(run / f"step-{number:08d}", layout, weights_of(one) if number == 2 else one)
    (run / "step-00000005" / "extra.json").unlink()
    write_latest(run, Latest("step-00000001", (stated_checksum(run / "step-00000001") or 0,)))
    mark_superseded([run / "step-00000004"])
    own = Process.current()
    begun = run / f".step-00000006.tmp-{own}.abcdef"
    begun.mkdir()
    (begun / "file").write_bytes(b"half")
    found = inspect(run).run
    assert found is not None
    assert [step.weights_only for step in found.steps] == [False, True, False, False, None]
    assert [step.superseded for step in found.steps] == [False, False, False, True, False]
    assert found.steps[4].damaged.endswith("extra.json: cannot be opened: No such file or directory")
    assert not any(step.damaged for step in found.steps[:4])
    for step in found.steps:
        assert step.bytes == sum(path.stat().st_size for path in (run / step.name).iterdir())
    assert inspect(run / "step-00000003").run is None
    gone = open_source(run)
    gone.path = run / "step-00000009"  # which a save beside has removed
    with patch("zerokit.checkpoint.formats.open_source", side_effect=[gone, open_source(run)]):
        assert inspect(run).step == 3
    plain = json.loads(zerokit(tmp_path, "inspect", "run", "--json").stdout)
    assert [step["name"] for step in plain["run"]["steps"]] == [f"step-{n:08d}" for n in range(1, 6)]
    (left,) = plain["run"]["leftovers"]
    assert (left["path"], left["target"], left["state"]) == (f"run/{begun.name}", "step-00000006", "alive")
    assert (left["host"], left["process"], left["bytes"]) == (own.host, own.pid, 4)
    done = zerokit(tmp_path, "inspect", "run")
    assert done.returncode == 0
    shown = [line.split("── ", 1)[-1].split("  ", 1) for line in done.stdout.splitlines()]
    told = {parts[0]: parts[1] for parts in shown if len(parts) == 2}
    assert told["step-00000002"].endswith(" kB, weights only")
    assert told["step-00000004"].endswith(" kB, superseded: load skips it")
    assert "damaged: run/step-00000005/extra.json: cannot be opened" in told["step-00000005"]
    assert told[begun.name] == f"4 bytes, process {own.pid} on {own.host} is writing it"


def test_another_step_than_latest_names_is_told(tmp_path: Path, step: Path) -> None:
    """By every command that takes a run's newest step; what they print on stdout stays what it is."""
    name_another = "step-00000100 is taken as the newest of run"
    (step.parent / "latest").write_text("damaged")
    for arguments, lines in (
        (["inspect", "run", "--json"], 1),
        (["diff", "run", "run", "--json"], 2),
        (["reshard", "run", "--to", "2"], 1),
        (["consolidate", "run", "-o", "out"], 1),
    ):
        done = zerokit(tmp_path, *arguments)
        assert done.returncode == 0
        told = [line for line in done.stderr.splitlines() if name_another in line]
        assert len(told) == lines
        assert all(line.startswith("zerokit: ") for line in told)
        if "--json" in arguments:
            notes = json.loads(done.stdout)["notes"]
            assert notes[0].startswith("run/latest: damaged")
            assert notes[1] == name_another


def write(path: Path, content: Content, world: int = 1, layout: Layout | None = None) -> Path:
    write_checkpoint(path, layout or example_layout(world), content)
    for file in path.glob("rank-*"):
        file.unlink()  # nobody may read it
    return path


def test_one_changed_byte_of_a_parameter_is_named(tmp_path: Path, content: Content) -> None:
    a = write(tmp_path / "a", content, 4)
    for number, (key, data) in enumerate(content.values.items()):
        if not data:
            continue
        values = content.values | {key: bytes([data[0] ^ 1]) + data[1:]}
        b = write(tmp_path / f"b{number}", replace(content, values=values), 3)
        found = diff(a, b)
        assert [(one.stream, one.name, one.change) for one in found.differences] == [(*key, "changed")]
        assert found.equal == len(content.values) - 1


def test_steps_small_files_and_their_members_are_compared(tmp_path: Path, content: Content) -> None:
    (name, dtype, shape, data), *others = content.common
    common = ((name, dtype, shape, bytes(len(data))), *others[1:], ("buffers/new", "bool", (1,), b"\1"))
    extra = example_extra(user={"a": 1, "b": 2}, more=1)
    a = write(tmp_path / "a", replace(content, extra=extra))
    rng = {"world": 1, "seed": 9, "step": 100}
    extra = example_extra(step=101, user={"b": 2, "a": 1}, rng=rng)
    b = write(tmp_path / "b", replace(content, step=101, common=common, extra=extra))
    found = {(one.stream, one.name): one.change for one in diff(a, b).differences}
    assert found == {
        ("checkpoint", "step"): "changed",
        ("common", name): "changed",
        ("common", others[0][0]): "removed",
        ("common", "buffers/new"): "added",
        ("extra", "rng"): "changed",
        ("extra", "more"): "removed",
    }
    assert diff(a, b).equal == len(content.values)


def test_parameters_and_streams_of_one_side_are_told(tmp_path: Path) -> None:
    def made(path: Path, *parameters: Parameter, kinds: set[str]) -> Path:
        layout = build_layout([Segment(None, parameters)], world=2, bucket_bytes=1 << 20)
        content = example_content(layout)
        streams = tuple(stream for stream in content.streams if stream.kind in kinds)
        return write(path, replace(content, streams=streams), layout=layout)

    same = Parameter("same", (0, 3))
    a = made(tmp_path / "a", same, Parameter("a", (2, 3), aliases=("tied",)), kinds={"master", "exp_avg"})
    b = made(tmp_path / "b", same, Parameter("a", (3, 2), group=1), Parameter("b", ()), kinds={"master"})
    found = diff(a, b)
    assert found.differences[:2] == (
        Difference("parameter", "a", "float32 [2, 3], group 0, tied with tied", "float32 [3, 2], group 1"),
        Difference("parameter", "b", None, "float32 [], group 0"),
    )
    rest = [
        (one.stream, one.name, one.change)
        for one in found.differences[2:]
        if one.stream not in ("common", "extra")
    ]
    assert rest == [
        ("master", "a", "changed"),
        ("master", "b", "added"),
        ("exp_avg", "same", "removed"),
        ("exp_avg", "a", "removed"),
    ]
    assert found.equal == 1


def test_other_units_are_no_difference_of_the_state(tmp_path: Path, content: Content) -> None:
    a = write(tmp_path / "a", content)
    layout = example_layout(2, bucket_bytes=1 << 20)
    line = {parameter.name: place for place, parameter in enumerate(layout.parameters)}
    old = list(example_layout(1).parameters)

    def moved(entry: Any) -> Any:
        return replace(entry, parameters=tuple(sorted(line[old[place].name] for place in entry.parameters)))

    streams = tuple(moved(stream) for stream in content.streams)
    scalars = tuple(moved(scalar) for scalar in content.scalars)
    found = diff(a, write(tmp_path / "b", replace(content, streams=streams, scalars=scalars), layout=layout))
    assert found.same
    assert [line.split(",")[0] for line in found.layout] == [
        "world size 1 and 2",
        "8 and 5 units",
        "buckets of 4096 and 1048576 bytes",
    ]


def test_the_command_answers_as_diff_does(tmp_path: Path, content: Content) -> None:
    write(tmp_path / "a", content, 2)
    write(tmp_path / "b", content, 3)
    values = {key: bytes(len(data)) for key, data in content.values.items()}
    write(tmp_path / "c", replace(content, values=values), 3)
    done = zerokit(tmp_path, "diff", "a", "b")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "layout   world size 2 and 3 (no difference of the state)\nno difference; 47 equal by CRC-32\n"
    )
    done = zerokit(tmp_path, "diff", "a", "c")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("changed  param/table  int64 [9] ")
    assert done.stdout.endswith("differences; 12 equal by CRC-32\n")
    done = zerokit(tmp_path, "diff", "--json", "a", "c")
    report = json.loads(done.stdout)
    assert (done.returncode, report["same"], report["equal"]) == (1, False, 12)
    assert report["differences"][0].keys() == {"stream", "name", "a", "b", "change"}
    (tmp_path / "b" / "manifest.json").write_bytes(b"{}")
    assert zerokit(tmp_path, "diff", "a", "b").returncode == 2
    write(tmp_path / "d", replace(content, extra=[1]), 3)
    done = zerokit(tmp_path, "diff", "a", "d")
    assert (done.returncode, done.stdout) == (2, "")
    assert "extra.json: not valid" in done.stderr


EVIL = "\x1b]0;title\x07\x1b[2J\u202e\u2028\x9b31m[red]\r\nzerokit: all is well"
"""Escape sequences, other control characters, another direction of writing, ends of lines, rich's markup."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps in which everything that has a name has an evil one, and such a one without its file."""
    made = tmp_path_factory.mktemp("evil")
    parameters = (
        Parameter(f"{EVIL}.weight", (8, 2), aliases=(f"{EVIL}.tied",)),
        Parameter("b", (3,), group=1),
        Parameter("a" + ".a" * 3000, (2,), group=1),
    )
    layout = build_layout([Segment(EVIL, parameters)], world=1, bucket_bytes=0)
    for name, seed in (("a", 0), ("b", 1), ("c", 1)):
        content = example_content(layout, seed=seed)
        kind = f"momentum{EVIL}"
        streams = (*content.streams, Stream(kind, "float32", (0, 1, 2)))
        values = content.values | {(kind, p.name): bytes([seed]) * 4 * p.numel for p in parameters}
        common = (*content.common, (f"buffers/{EVIL}", "uint8", (1,), bytes([seed])))
        extra = content.extra | {EVIL: seed}  # type: ignore[operator]
        write_checkpoint(
            made / name, layout, replace(content, streams=streams, values=values, common=common, extra=extra)
        )
    rank = made / "c" / "rank-00000-of-00001.safetensors"
    data = bytearray(rank.read_bytes())
    data[-1] ^= 1  # of the stream with the evil name
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    rank.write_bytes(data)
    write_run(made / "run", example_layout(2), example_content(example_layout(2)))
    (made / "tmp").mkdir()
    (made / "c" / f"stranger{EVIL.replace('/', '')}").write_bytes(b"")
    return made


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", "a"], 0),
        (["verify", "c"], 1),
        (["diff", "a", "b"], 1),
        (["reshard", "c", "--to", "2", "-o", "out"], 1),
        (["consolidate", "c", "-o", "out"], 1),
        (["consolidate", "a", "-o", "out", "--stream", "none"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_names_cannot_steer_a_terminal(folder: Path, arguments: list[str], code: int) -> None:
    done = zerokit(folder, *arguments)
    assert done.returncode == code, done.stderr
    told = done.stdout + done.stderr
    assert r"\x1b]0;title\x07\x1b[2J\u202e\u2028\x9b31m[red]\r\nzerokit: all is well" in told
    assert all(letter == "\n" or letter.isprintable() for letter in told)
    assert "\nzerokit: all is well" not in told


BEYOND = "expected an integer from 1 to 1048576"
REFUSED = [
    ("reshard a --to 99999999", 2, BEYOND),
    ("reshard a --to 0", 2, "Invalid value for '--to': 0 is not in the range x>=1."),
    ("reshard a --to 2 --jobs 0", 2, "Invalid value for '--jobs'"),
    ("reshard a --to 2 --jobs 99999999", 2, "jobs=99999999: expected 1 to 1024"),
    ("reshard nowhere --to 2", 2, "Error: nowhere: does not exist"),
    ("reshard tmp --to 2", 1, "zerokit: tmp: not a checkpoint"),
    ("reshard run --to 2 -o run", 1, "the output is the source itself"),
    ("reshard run --to 2 -o tmp", 1, "zerokit: tmp: exists"),
    ("consolidate a -o out --max-shard-size 0", 2, "size '0'"),
    ("consolidate a -o out --dtype fp12", 2, "'fp12' is not one of 'bf16', 'fp16', 'fp32'."),
    ("consolidate run -o run", 1, "zerokit: run: the output is the source itself"),
    ("verify nowhere", 2, "Error: nowhere: does not exist: give the directory of a step, or of a run\n"),
    ("verify tmp", 1, "zerokit: tmp: not a checkpoint"),
    ("diff a nowhere", 2, "nowhere: does not exist"),
    ("inspect nowhere", 2, "nowhere: does not exist"),
    ("reshard a --to 2 -o nowhere/out", 2, "its parent directory nowhere does not exist: create it first"),
    ("convert nowhere -o out", 2, "nowhere: does not exist"),
    ("convert a out -o other", 2, "out: does not exist: give the directory of a step, or of a run"),
    ("consolidate nowhere", 2, "nowhere: does not exist"),
    ("consolidate a -o out --like nowhere", 2, "Path 'nowhere' does not exist."),
    ("prune run --keep-last 0", 2, "Invalid value for '--keep-last'"),
    ("prune run --keep-every 2", 2, "--keep-every M needs --keep-last K: without it no step is removed"),
    ("prune nowhere", 2, "Error: nowhere: does not exist: give the directory of a run"),
    ("prune run/latest", 1, "zerokit: run/latest: is not a directory"),
    ("prune a", 1, "is a step: give a run's directory"),
    ("prune tmp --keep-last 1", 1, "zerokit: tmp: not a checkpoint"),
]


@pytest.mark.parametrize(("line", "code", "message"), REFUSED, ids=[line for line, *_ in REFUSED])
def test_what_cannot_be_is_refused_in_plain_words(folder: Path, line: str, code: int, message: str) -> None:
    before = sorted(folder.rglob("*"))
    done = zerokit(folder, *line.split())
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(folder.rglob("*")) == before


def test_no_command_loads_torch_and_most_not_numpy(tmp_path: Path) -> None:
    write_run(tmp_path / "run", example_layout(3), example_content(example_layout(3)))
    code = """
import sys
from zerokit.cli import main
for line in sys.argv[1:]:
    sys.argv = ["zerokit", *line.split()]
    try:
        main()
    except SystemExit as end:
        print("loaded", end.code, sorted({"torch", "mlflow", "numpy", "rich", "safetensors"} & set(sys.modules)))
from zerokit.checkpoint.reader import Checkpoint
Checkpoint("run").read("master", "gain")
assert not {"torch", "mlflow", "safetensors"} & set(sys.modules)
"""
    lines = ("prune run --keep-last 1", "reshard run --to 4", "verify run", "diff run run", "inspect run")
    done = run_python(tmp_path, "-c", code, *lines, "consolidate run -o out")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("loaded")]
    assert told[:2] == ["loaded 0 []"] * 2
    assert not [
        line for line in told if "torch" in line or "mlflow" in line or not line.startswith("loaded 0")
    ]
    assert len(told) == 6
    assert not [line for line in told[:5] if "numpy" in line]
