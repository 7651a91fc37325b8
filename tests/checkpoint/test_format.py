"""FORMAT.md is enough: a reader that knows nothing else reads every checkpoint, and its examples are right."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors

import zerokit.checkpoint
from tests.support.checkpoints import (
    Content,
    example_content,
    example_layout,
    weights_of,
    write_checkpoint,
    write_run,
)
from zerokit.checkpoint.extents import Stream, rank_file
from zerokit.checkpoint.extra import MAX_DEPTH
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, HEADER_ALIGNMENT, MAX_BYTES, lay_out
from zerokit.layout import ALIGNMENT, Layout, Parameter, Segment, build_layout

TEXT = (Path(zerokit.checkpoint.__file__).parent / "FORMAT.md").read_text()


# The stranger's reader: standard library, and no module of zerokit.

SIZES = {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2}


def up(number: int) -> int:
    return -(-number // 64) * 64


def read_manifest(step: Path) -> dict[str, Any]:
    content = (step / "manifest.json").read_bytes()
    assert content[:10] == b'{"crc32":"'
    assert int(content[10:18], 16) == zlib.crc32(content[20:])
    manifest: dict[str, Any] = json.loads(content)
    assert manifest["format"] == "zerokit.checkpoint"
    return manifest


def slices(manifest: dict[str, Any], rank: int) -> dict[int, tuple[int, int]]:
    """Position → interval of the rank's slice."""
    found, position = {}, 0
    for unit in manifest["units"]:
        members = range(position, position + unit["parameters"])
        numels = [math.prod(manifest["parameters"][place]["shape"]) for place in members]
        size = up(-(-sum(map(up, numels)) // manifest["world"]))
        offset = 0
        for place, numel in zip(members, numels, strict=True):
            start, stop = max(offset, rank * size), min(offset + numel, (rank + 1) * size)
            if start < stop:
                found[place] = (start - offset, stop - offset)
            offset += up(numel)
        position += unit["parameters"]
    return found


def read_all(step: Path) -> dict[tuple[str, str], bytes]:
    """(kind, parameter) → the bytes of the whole parameter."""
    manifest = read_manifest(step)
    values: dict[tuple[str, str], bytes] = {}
    crcs: dict[tuple[int, int], list[int]] = {}
    for rank, file in enumerate(manifest["files"]):
        content = (step / file["name"]).read_bytes()
        assert len(content) == file["bytes"]
        assert zlib.crc32(content[: file["header_bytes"]]) == int(file["header_crc32"], 16)
        held, position = slices(manifest, rank), file["header_bytes"]
        for number, stream in enumerate(manifest["streams"]):
            for first, last in stream["parameters"]:
                for place in range(first, last):
                    start, stop = held.get(place, (0, 0))
                    piece = content[position : position + (stop - start) * SIZES[stream["dtype"]]]
                    position += len(piece)
                    if piece:
                        crcs.setdefault((number, place), []).append(zlib.crc32(piece))
                    key = (stream["kind"], manifest["parameters"][place]["name"])
                    values[key] = values.get(key, b"") + piece
        assert position == len(content)
    for number, stream in enumerate(manifest["streams"]):
        text = "".join(f"{crc:08x}" for key in sorted(crcs) if key[0] == number for crc in crcs[key])
        assert text == stream["crc32"]
    for member in ("common", "extra"):
        content = (step / manifest[member]["name"]).read_bytes()
        assert (len(content), zlib.crc32(content)) == (
            manifest[member]["bytes"],
            int(manifest[member]["crc32"], 16),
        )
    return values


@pytest.mark.parametrize(("world", "weights_only"), [(1, False), (7, False), (64, False), (3, True)])
def test_a_stranger_s_reader_reads_everything(tmp_path: Path, world: int, weights_only: bool) -> None:
    content = example_content(example_layout(world))
    content = weights_of(content) if weights_only else content
    step = write_run(tmp_path / "run", example_layout(world), content)
    assert read_all(step) == content.values
    manifest = read_manifest(step)
    assert (step.parent / "latest").read_text().split() == [step.name, manifest["crc32"]]
    if weights_only:
        assert f'"content":"{manifest["content"]}"' in TEXT
        assert (manifest["version"], manifest["scalars"]) == ([1, 1], [])
        assert {kind for kind, _ in content.values} == {"master", "param"}


@pytest.fixture
def example() -> list[Parameter]:
    return [Parameter("weight", (20, 10)), Parameter("bias", (3,))]


def made(parameters: list[Parameter], world: int) -> Layout:
    return build_layout([Segment(None, tuple(parameters))], world=world, bucket_bytes=1 << 20)


def test_the_example_of_cuts_is_right(example: list[Parameter]) -> None:
    rows = [
        line.split("|")[1:-1] for line in TEXT.splitlines() if line.startswith("| ") and "weight 0–" in line
    ]
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4]
    for world, size, *ranks in rows:
        layout = made(example, int(world))
        assert layout.units[0].shard_numel == int(size.split("=")[-1])
        for rank, cell in enumerate(ranks):
            owned = layout.units[0].owned(rank) if rank < int(world) else ()
            told = [f"{s.parameter.name} {s.interval.start}–{s.interval.stop}" for s in owned]
            assert cell.strip() == ", ".join(told)
    assert not list(made(example, 4).units[0].owned(3))


def test_the_example_of_a_file_is_right(example: list[Parameter]) -> None:
    streams = [Stream(kind, "float32", (0, 1)) for kind in ("master", "exp_avg")]
    file = rank_file(made(example, 2), streams, 100, 1)
    for extent in file.extents:
        name = f"{streams[extent.stream].kind}/{example[extent.position].name}"
        elements = f"{extent.interval.start}–{extent.interval.stop}"
        assert f"| {extent.offset}–{extent.offset + extent.size} | `{name}`, elements {elements} |" in TEXT
    assert len(file.header) == 4096


def test_the_constants_are_right() -> None:
    for dtype, width in ELEMENT_BYTES.items():
        name = json.loads(lay_out([("x", dtype, ())], {})[0][8:])["x"]["dtype"]
        assert f"| `{dtype}` | {width} | {name} |" in TEXT.replace(", a byte of 0 or 1", "")
    assert f"A = {ALIGNMENT} " in TEXT
    assert f"multiple of {HEADER_ALIGNMENT} bytes" in TEXT
    assert f"over {MAX_BYTES:,} bytes" in TEXT
    assert f"nested at most {MAX_DEPTH} deep" in TEXT
    assert f"{zlib.crc32(b'123456789'):08x}" in TEXT


def test_a_header_is_written_as_told(tmp_path: Path) -> None:
    layout = example_layout(2)
    content: Content = example_content(layout)
    write_checkpoint(tmp_path / "step", layout, content)
    path = tmp_path / "step" / "rank-00000-of-00002.safetensors"
    text = path.read_bytes()[8:4096]
    assert text.startswith(
        b'{"__metadata__":{"format":"zerokit","step":"100","rank":"0","world":"2"},'
        b'"param/table":{"dtype":"I64","shape":[9],"data_offsets":[0,72]},"master/tok.weight":{"dtype":"F32",'
    )
    with safetensors.safe_open(path, "np") as stock:
        assert stock.metadata() == {"format": "zerokit", "step": "100", "rank": "0", "world": "2"}
