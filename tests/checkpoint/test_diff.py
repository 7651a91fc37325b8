"""`diff`: the same state at any world size is the same; what differs is named; no stream is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cli.inside import zerokit_inside as zerokit
from tests.support.checkpoints import (
    Content,
    example_content,
    example_extra,
    example_layout,
    write_checkpoint,
)
from zerokit.checkpoint.diff import Difference, diff
from zerokit.layout import Layout, Parameter, Segment, build_layout


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


def test_a_small_file_that_cannot_be_read_differs(tmp_path: Path, content: Content) -> None:
    a = write(tmp_path / "a", content)
    b = write(tmp_path / "b", replace(content, extra=[1]))
    (found,) = diff(a, b).differences
    assert found.stream == "extra"
    assert found.name.startswith("unreadable: ")
    assert diff(a, b).unread == ("extra.json",)
    done = zerokit(tmp_path, "diff", "a", "b")
    assert done.returncode == 2
    assert "unreadable" in done.stdout


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
