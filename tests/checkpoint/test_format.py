"""FORMAT.md is enough for a reader that knows nothing else; every malformed manifest is refused by what is wrong."""

from __future__ import annotations

import copy
import json
import math
import re
import tracemalloc
import zlib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import safetensors

import zerokit.checkpoint
from tests.support.checkpoints import (
    Content,
    coded,
    example_content,
    example_layout,
    sealed,
    weights_of,
    write_checkpoint,
    write_run,
)
from tests.support.dealt import deal
from tests.support.mutations import put
from zerokit.checkpoint.extra import MAX_DEPTH
from zerokit.checkpoint.manifest import MAX_WORLD, Manifest, own_checksum, parse_manifest
from zerokit.checkpoint.safetensors import (
    ELEMENT_BYTES,
    HEADER_ALIGNMENT,
    MAX_BYTES,
    Stream,
    lay_out,
    rank_file,
)
from zerokit.checkpoint.strict import MAX_NUMEL
from zerokit.errors import CheckpointError
from zerokit.layout import ALIGNMENT, Layout, Parameter, Segment, build_layout

TEXT = (Path(zerokit.checkpoint.__file__).parent / "FORMAT.md").read_text()


# The stranger's reader: standard library, and no module of zerokit.

SIZES = {
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "bfloat16": 2,
    "uint8": 1,
}


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
        total = sum(map(up, numels))
        size = up(-(-total // manifest["world"]))
        first, last = rank * size, (rank + 1) * size
        if shares := manifest.get("shares"):
            ends = [up(-(-total * sum(shares[:count]) // sum(shares))) for count in range(len(shares) + 1)]
            first, last = ends[rank], ends[rank + 1]
        offset = 0
        for place, numel in zip(members, numels, strict=True):
            start, stop = max(offset, first), min(offset + numel, last)
            if start < stop:
                found[place] = (start - offset, stop - offset)
            offset += up(numel)
        position += unit["parameters"]
    return found


def is_apart(manifest: dict[str, Any], stream: dict[str, Any]) -> bool:
    kind: str = stream["kind"]
    return "frozen" in manifest and kind == "param"


def beside(
    step: Path, manifest: dict[str, Any], stream: dict[str, Any], values: dict[tuple[str, str], bytes]
) -> list[bytes]:
    """The parameters of the stream that have elements; all of them are added to `values`."""
    shared = read_all(step.parent / manifest["frozen"]["base"])
    found = []
    for first, last in stream["parameters"]:
        for parameter in manifest["parameters"][first:last]:
            if math.prod(parameter["shape"]):
                found.append(shared["param", parameter["name"]])
            values["param", parameter["name"]] = shared["param", parameter["name"]]
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
            for first, last in () if is_apart(manifest, stream) else stream["parameters"]:
                for place in range(first, last):
                    start, stop = held.get(place, (0, 0))
                    start, stop = start // stream.get("block", 1), -(-stop // stream.get("block", 1))
                    piece = content[position : position + (stop - start) * SIZES[stream["dtype"]]]
                    position += len(piece)
                    if piece:
                        crcs.setdefault((number, place), []).append(zlib.crc32(piece))
                    key = (stream["kind"], manifest["parameters"][place]["name"])
                    values[key] = values.get(key, b"") + piece
        assert position == len(content)
    for number, stream in enumerate(manifest["streams"]):
        if is_apart(manifest, stream):
            assert (
                "".join(f"{zlib.crc32(data):08x}" for data in beside(step, manifest, stream, values))
                == stream["crc32"]
            )
            continue
        text = "".join(f"{crc:08x}" for key in sorted(crcs) if key[0] == number for crc in crcs[key])
        assert text == stream["crc32"]
    for member in ("common", "extra"):
        content = (step / manifest[member]["name"]).read_bytes()
        assert (len(content), zlib.crc32(content)) == (
            manifest[member]["bytes"],
            int(manifest[member]["crc32"], 16),
        )
    return values


def read_uncut(step: Path, manifest: dict[str, Any]) -> dict[tuple[str, int, int], dict[str, Any]]:
    """(parameter, first row, end of rows) → states that are not cut by kind, tensors as their bytes."""
    found = {}
    for entry in manifest.get("uncut", ()):
        first, last = entry["rows"]
        assert entry["name"] == f"states-{entry['parameter']:05d}-{first:05d}.safetensors"
        content = (step / entry["name"]).read_bytes()
        assert (len(content), f"{zlib.crc32(content):08x}") == (entry["bytes"], entry["crc32"])
        length = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:length])
        metadata = header.pop("__metadata__")
        tensors = {
            name: content[length + place["data_offsets"][0] : length + place["data_offsets"][1]]
            for name, place in header.items()
        }
        states = json.loads(metadata["states"])
        assert sorted(states) == entry["kinds"]
        name = manifest["parameters"][entry["parameter"]]["name"]
        found[name, first, last] = {kind: decoded(value, tensors) for kind, value in states.items()}
    return found


def read_nodes(steps: list[Path], into: Path) -> dict[tuple[str, str], bytes]:
    """`read_all` of what nodes' directories of one step have together, of which some may be gone."""
    into.mkdir()
    for step in steps:
        content = (step / "node.json").read_bytes()
        assert content[:10] == b'{"crc32":"'
        assert int(content[10:18], 16) == zlib.crc32(content[20:])
        record, manifest = json.loads(content), read_manifest(step)
        NODE_VALIDATOR.validate(record)
        assert (record["format"], record["version"]) == ("zerokit.node", [1, 0])
        assert (record["step"], record["manifest_crc32"]) == (manifest["step"], manifest["crc32"])
        assert sorted(rank for ranks in record["wrote"] for rank in ranks) == list(range(manifest["world"]))
        ranks = record["holds"][record["node"]]
        assert ranks[: len(record["wrote"][record["node"]])] == record["wrote"][record["node"]]
        names = {manifest["files"][rank]["name"] for rank in ranks}
        names.update(name for rank in ranks for name in record["uncut"][rank])
        whole = {"manifest.json", "node.json", manifest["common"]["name"], manifest["extra"]["name"]}
        assert {path.name for path in step.iterdir()} == names | whole
        for path in step.iterdir():
            (into / path.name).write_bytes(path.read_bytes())
    (into / "node.json").unlink()
    return read_all(into)


def decoded(value: Any, tensors: dict[str, bytes]) -> Any:
    """Lists and tensors; no other values are here."""
    if isinstance(value, list):
        return [decoded(one, tensors) for one in value]
    return tensors[value["tensor"]] if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("world", "kind"),
    [(1, "whole"), (7, "whole"), (64, "whole"), (3, "weights"), (1, "codes"), (7, "codes"), (64, "codes")],
)
def test_a_stranger_s_reader_reads_everything(tmp_path: Path, world: int, kind: str) -> None:
    content, weights_only = example_content(example_layout(world)), kind == "weights"
    content = weights_of(content) if weights_only else content
    content = coded(content, example_layout(world)) if kind == "codes" else content
    step = write_run(tmp_path / "run", example_layout(world), content)
    assert read_all(step) == content.values
    manifest = read_manifest(step)
    assert (step.parent / "latest").read_text().split() == [step.name, manifest["crc32"]]
    assert (manifest["version"][0] == 4) == (kind == "codes")
    VALIDATOR.validate(manifest)
    if weights_only:
        assert f'"content":"{manifest["content"]}"' in TEXT
        assert (manifest["version"], manifest["scalars"]) == ([1, 1], [])
        assert {kind for kind, _ in content.values} == {"master", "param"}


@pytest.mark.parametrize(("nodes", "chosen"), [(1, [0]), (4, [0, 1, 2, 3]), (4, [2, 0]), (3, [1, 2])])
def test_a_stranger_s_reader_reads_what_nodes_have(tmp_path: Path, nodes: int, chosen: list[int]) -> None:
    content = example_content(example_layout(6))
    step = write_run(tmp_path / "run", example_layout(6), content)
    runs = deal(step, tmp_path, nodes=nodes, copies=2)
    steps = [runs[node] / step.name for node in chosen]
    assert read_nodes(steps, tmp_path / "all") == content.values
    assert {path.name: path.read_bytes() for path in (tmp_path / "all").iterdir()} == {
        path.name: path.read_bytes() for path in step.iterdir()
    }


def test_the_example_of_a_record_is_right(tmp_path: Path) -> None:
    step = write_run(tmp_path / "run", example_layout(6), example_content(example_layout(6)))
    record = (deal(step, tmp_path, nodes=3, copies=2)[1] / step.name / "node.json").read_text()
    body = record[record.index('"node":') :]
    assert f"    {body}" in TEXT


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
        assert layout.units[0].cut.piece_numel == int(size.split("=")[-1])
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
    text = re.sub(", a byte of 0 or 1|, (two|four) numbers", "", TEXT)
    for dtype, width in ELEMENT_BYTES.items():
        name = json.loads(lay_out([("x", dtype, (1,))], {})[0][8:])["x"]["dtype"]
        assert f"| `{dtype}` | {width} | {name} |" in text
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


NODE_SCHEMA = json.loads(files("zerokit.checkpoint").joinpath("node.schema.json").read_text())
NODE_VALIDATOR = jsonschema.Draft202012Validator(NODE_SCHEMA)
SCHEMA = json.loads(files("zerokit.checkpoint").joinpath("manifest.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    layout = example_layout(3)
    return write_checkpoint(tmp_path_factory.mktemp("made") / "step", layout, example_content(layout))


@pytest.fixture(scope="module")
def plain(manifest: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(manifest.to_bytes())
    return found


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator.check_schema(NODE_SCHEMA)
    assert set(SCHEMA["$defs"]["dtype"]["enum"]) == set(ELEMENT_BYTES)
    assert SCHEMA["properties"]["world"]["maximum"] == MAX_WORLD
    assert SCHEMA["$defs"]["shape"]["items"]["maximum"] == MAX_NUMEL


def test_a_manifest_is_read_back_as_written(manifest: Manifest, plain: dict[str, Any]) -> None:
    content = manifest.to_bytes()
    assert parse_manifest(content, "manifest.json") == manifest
    assert parse_manifest(content, "manifest.json").to_bytes() == content
    VALIDATOR.validate(json.loads(content))
    # Members of a higher minor version are ignored.
    newer = plain | {"version": [1, 7], "colour": "green"}
    newer["streams"] = [stream | {"compression": None} for stream in plain["streams"]]
    assert parse_manifest(sealed(newer), "manifest.json") == manifest
    VALIDATOR.validate(newer)


def test_what_is_no_manifest_is_told() -> None:
    for content in (b"", b"{}", b'{"crc32":"0123456G",', b"\x80" * 40, b'{"crc32":"01234567"}'):
        assert own_checksum(content) is None
        with pytest.raises(CheckpointError, match="here: not a zerokit manifest"):
            parse_manifest(content, "here")


def many_scalars(plain: Any) -> None:
    """A short text that stands for 10^7 positions."""
    count = len(plain["parameters"])
    plain["parameters"] += [
        {"name": f"p{i}", "shape": [0], "dtype": "float32", "group": 0, "trainable": True, "aliases": []}
        for i in range(10_000)
    ]
    plain["units"].append({"scopes": [], "parameters": 10_000})
    plain["streams"][1]["parameters"].append([count, count + 10_000])
    stretch = {"dtype": "uint8", "shape": [], "parameters": [[0, count + 10_000]]}
    plain["scalars"] = [stretch | {"kind": str(i)} for i in range(1_000)]


def stream(number: int, **members: Any) -> Callable[[Any], None]:
    """These members of a stream."""
    return lambda plain: plain["streams"][number].update(members)


def doubled(key: str, times: int = 2) -> Callable[[Any], None]:
    return lambda plain: plain.update({key: plain[key] * times})


def one_unit(plain: Any) -> None:
    plain["units"] = [{"scopes": [], "parameters": len(plain["parameters"])}]


def in_capitals(plain: Any) -> None:
    plain["streams"][1]["crc32"] = "ABCDEF01" + plain["streams"][1]["crc32"][8:]


def apart(frozen: dict[str, str]) -> Callable[[Any], None]:
    return lambda plain: plain.update(version=[2, 0], frozen=frozen)


def uncut(position: int, kinds: list[str], **members: Any) -> Callable[[Any], None]:
    """A file of states that are not cut; with no other members it is listed twice."""
    entry = {"parameter": position, "rows": [0, 1], "kinds": kinds, "bytes": 4096, "crc32": "00000000"}
    entry |= {"name": f"states-{position:05d}-00000.safetensors"} | members
    return lambda plain: plain.update(version=[3, 0], uncut=[entry] * (2 if members == {} else 1))


CODES: dict[str, tuple[Callable[[Any], None], str]] = {
    "another block": (stream(2, block=32), "'exp_avg.scale' of float32 has an element for each 32 of its"),
    "a block of none": (stream(2, block=0), "'block' is 0, expected 1 to"),
    "a block as a text": (stream(2, block="64"), "'block' is '64', expected int"),
    "scales without blocks": (stream(2, block=1), "'exp_avg' of parameter 0 has codes without scales"),
    "scales of another kind": (
        stream(2, kind="exp_avg.scales"),
        "'exp_avg.scales' of float32 has an element",
    ),
    "scales of nothing": (stream(2, kind="exp_avg.zcale"), "has an element for each 64"),
    "blocks of the weights": (stream(1, block=64), "stream 'master' of float32 has an element for each 64"),
    "blocks of codes": (stream(5, block=64), "stream 'exp_avg' of float8_e4m3fn has an element for each 64"),
    "codes in another dtype": (stream(5, dtype="uint8"), "'exp_avg' of parameter 0 has scales of no codes"),
    "scales in another dtype": (stream(2, dtype="int32"), "'exp_avg.scale' of int32 has an element for each"),
    "no scales": (
        lambda plain: [each.pop("block", None) for each in plain["streams"]].clear(),
        "no stream of scales is listed",
    ),
    "scales of fewer": (
        lambda plain: plain["streams"][2].update(
            parameters=[[0, 1]], crc32=plain["streams"][2]["crc32"][: 8 * 3]
        ),
        "'exp_avg' of parameter 1 has codes without scales",
    ),
    "codes of version 3": (put("version", value=[3, 0]), "'uncut' is missing"),
}


@pytest.mark.parametrize("case", CODES)
def test_codes_that_do_not_fit_their_scales_are_refused(tmp_path: Path, case: str) -> None:
    layout = example_layout(3)
    written = write_checkpoint(tmp_path / "step", layout, coded(example_content(layout), layout))
    assert parse_manifest(written.to_bytes(), "here") == written
    plain = json.loads(written.to_bytes())
    assert [plain["streams"][number]["kind"] for number in (1, 2, 5)] == [
        "master",
        "exp_avg.scale",
        "exp_avg",
    ]
    change, message = CODES[case]
    change(plain)
    with pytest.raises(CheckpointError, match=message):
        parse_manifest(sealed(plain), "there/manifest.json")


OUTSIDE = "../rank-00000-of-00003.safetensors"
REFUSALS: dict[str, tuple[Callable[[Any], None], str]] = {
    "another content": (put("content", value="adapters"), "'adapters', this zerokit knows 'weights': use"),
    "weights with more": (put("content", value="weights"), "but there is optimizer state: 'exp_avg'"),
    "another format": (put("format", value="torch"), "format is 'torch', expected 'zerokit.checkpoint'"),
    "another major version": (
        put("version", value=[6, 0]),
        r"version is 6.0, this zerokit reads 1.x to 5.x: use",
    ),
    "frozen nowhere": (put("version", value=[2, 0]), "'frozen' is missing"),
    "frozen elsewhere": (
        apart({"base": "../step-00000001"}),
        "are in '../step-00000001', expected 'frozen-'",
    ),
    "frozen by slices": (apart({}), "has 6 checksums of eight digits, expected 4"),
    "another alignment": (put("alignment", value=32), "alignment is 32, expected 64"),
    "ranks without files": (put("world", value=2**20), "of eight digits, expected|3 files are listed"),
    "a truth as a number": (put("step", value=True), "'step' is 'True', expected int"),
    "half a surrogate pair": (put("parameters", 0, "name", value="\ud800"), "surrogates not allowed"),
    "another's alias": (put("parameters", 0, "aliases", value=["gain"]), "two parameters are called 'gain'"),
    "a million dimensions": (put("parameters", 0, "shape", value=[2**62] * 10**6), "is impossible"),
    "an empty unit": (put("units", 0, "parameters", value=0), "'parameters' is 0, expected 1 to"),
    "a mixed unit": (one_unit, "mixes frozen and trainable parameters, or groups"),
    "streams twice": (doubled("streams"), "streams are not in order"),
    "a parameter in no stream": (stream(-1, parameters=[], crc32=""), "is in no param stream"),
    "a checksum in capitals": (in_capitals, "'ABCDEF01' is not a CRC-32 of eight hexadecimal digits"),
    "uncut nowhere": (put("version", value=[3, 0]), "'uncut' is missing"),
    "uncut twice": (uncut(0, ["GG"]), "uncut states of parameter 0 are not in order, or of the same rows"),
    "uncut rows that are not there": (uncut(0, ["GG"], rows=[0, 51]), "which has no such rows"),
    "uncut states of no parameter": (uncut(99, ["GG"]), "'parameter' is 99, expected 0 to"),
    "uncut of no kind": (uncut(0, [], rows=[0, 2]), "uncut states of parameter 0 are not in order"),
    "uncut and cut": (uncut(0, ["exp_avg"], rows=[0, 2]), "'exp_avg' of parameter 0 is uncut, and there is"),
    "uncut elsewhere": (uncut(0, ["GG"], name="../a"), "is called '../a', expected 'states-00000-00000.safe"),
    "scalars twice": (doubled("scalars"), "scalars of one kind are listed twice"),
    "a flood of scalars": (many_scalars, "hold more than 4194304 parameters together"),
    "too many streams": (doubled("streams", 1000), "000 streams are listed, 1024 are allowed"),
    "both": (put("scalars", 0, "kind", value="exp_avg"), "'exp_avg' of parameter 0 is in a stream and in"),
    "a file outside": (put("files", 0, "name", value=OUTSIDE), f"a file is called '{OUTSIDE}', expected"),
    "more in a row than at all": (
        put("skipped", value={"total": 1, "in_a_row": 2}),
        "'in_a_row' is 2, expected 0 to 1",
    ),
    "a negative size": (put("files", 0, "bytes", value=-1), "'bytes' is -1, expected 4096 to"),
    "common elsewhere": (
        put("common", "name", value="/etc/passwd"),
        "a file is called '/etc/passwd', expected",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_malformed_manifest_is_refused_although_its_checksum_is_right(
    plain: dict[str, Any], case: str
) -> None:
    change, message = REFUSALS[case]
    changed = copy.deepcopy(plain)
    change(changed)
    content = sealed(changed)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_manifest(content, "there/manifest.json")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 28  # a few bytes may stand for millions of positions
    assert str(caught.value).startswith("there/manifest.json: not valid: ")
    assert len(str(caught.value)) < 500


def test_a_malformed_text_is_refused_although_its_checksum_is_right() -> None:
    for body, message in (
        (b'"a":1,"a":2}', "duplicate key 'a'"),
        (b'"crc32":"00000000"}', "duplicate key 'crc32'"),
        (b'"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}", "recursion"),
        (b'"a":"\xff"}', "can't decode"),
        (b'"a":1}{}', "Extra data"),
        (b"", "property name"),
    ):
        with pytest.raises(CheckpointError, match=message):
            parse_manifest(sealed(body), "here")
