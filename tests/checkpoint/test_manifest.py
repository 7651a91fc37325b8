"""Manifests: read back as written, as the schema says; every malformed one is refused by what is wrong with it."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import example_content, example_layout, sealed, write_checkpoint
from tests.support.mutations import mutated, put
from zerokit.checkpoint.extents import file_name, rank_file
from zerokit.checkpoint.manifest import MAX_WORLD, Manifest, own_checksum, parse_manifest
from zerokit.checkpoint.safetensors import ELEMENT_BYTES
from zerokit.checkpoint.strict import MAX_NUMEL
from zerokit.errors import CheckpointError

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


def test_any_flipped_bit_is_found(manifest: Manifest) -> None:
    content = manifest.to_bytes()
    for place in range(0, len(content), 3):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        with pytest.raises(CheckpointError, match=r"^here: "):
            parse_manifest(bytes(changed), "here")


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


REFUSALS: dict[str, tuple[Callable[[Any], None], str]] = {
    "another content": (
        put("content", value="adapters"),
        "'adapters', this zerokit knows 'weights': use a newer",
    ),
    "weights with more": (
        put("content", value="weights"),
        "content is 'weights', but there is optimizer state: 'exp_avg'",
    ),
    "another format": (put("format", value="torch"), "format is 'torch', expected 'zerokit.checkpoint'"),
    "another major version": (
        put("version", value=[2, 0]),
        r"version is 2.0, this zerokit reads 1.x: use a newer",
    ),
    "another alignment": (put("alignment", value=32), "alignment is 32, expected 64"),
    "ranks without files": (
        put("world", value=2**20),
        "checksums of eight digits, expected|3 files are listed",
    ),
    "a truth as a number": (put("step", value=True), "'step' is 'True', expected int"),
    "half a surrogate pair": (put("parameters", 0, "name", value="\ud800"), "surrogates not allowed"),
    "an alias of another's name": (
        put("parameters", 0, "aliases", value=["gain"]),
        "two parameters are called 'gain'",
    ),
    "a million dimensions": (put("parameters", 0, "shape", value=[2**62] * 10**6), "is impossible"),
    "an empty unit": (put("units", 0, "parameters", value=0), "'parameters' is 0, expected 1 to"),
    "a unit of frozen and trainable": (
        lambda plain: plain.update(units=[{"scopes": [], "parameters": len(plain["parameters"])}]),
        "mixes frozen and trainable parameters, or groups",
    ),
    "a stream twice": (
        lambda plain: plain["streams"].insert(0, plain["streams"][0] | {"parameters": [], "crc32": ""}),
        "streams are not in order",
    ),
    "a parameter in no stream": (
        lambda plain: plain["streams"][-1].update(parameters=[], crc32=""),
        "is in no param stream",
    ),
    "a checksum in capitals": (
        lambda plain: put("streams", 1, "crc32", value="ABCDEF01" + plain["streams"][1]["crc32"][8:])(plain),
        "'ABCDEF01' is not a CRC-32 of eight hexadecimal digits",
    ),
    "scalars twice": (
        lambda plain: plain.update(scalars=plain["scalars"] * 2),
        "scalars of one kind are listed twice",
    ),
    "a flood of scalars": (many_scalars, "hold more than 4194304 parameters together"),
    "too many streams": (
        lambda plain: plain.update(streams=plain["streams"] * 1000),
        "000 streams are listed, 1024 are allowed",
    ),
    "scalars that are a stream": (
        put("scalars", 0, "kind", value="exp_avg"),
        "'exp_avg' of parameter 0 is in a stream and in scalars",
    ),
    "a file outside": (
        put("files", 0, "name", value="../rank-00000-of-00003.safetensors"),
        "a file is called '../rank-00000-of-00003.safetensors', expected 'rank-00000-of-00003.safetensors'",
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


def accepted(content: bytes) -> None:
    """Read a manifest; what is accepted follows the schema, and its files can be computed."""
    try:
        found = parse_manifest(content, "here")
    except CheckpointError:
        return
    VALIDATOR.validate(json.loads(content))
    assert parse_manifest(found.to_bytes(), "here") == found
    for rank in {0, found.world - 1}:
        file = rank_file(found.layout, found.streams, found.step, rank)
        assert file.name == file_name(rank, found.world)


@settings(max_examples=150)
@given(st.data())
def test_a_changed_manifest_is_read_or_refused_and_nothing_else(
    plain: dict[str, Any], data: st.DataObject
) -> None:
    accepted(sealed(mutated(plain, data)))


@settings(max_examples=100)
@given(st.data())
def test_changed_bytes_are_read_or_refused_and_nothing_else(manifest: Manifest, data: st.DataObject) -> None:
    body = bytearray(manifest.to_bytes()[20:])
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(body)))
        stop = data.draw(st.integers(start, min(len(body), start + 6)))
        body[start:stop] = data.draw(
            st.one_of(
                st.binary(max_size=4),
                st.sampled_from([b"0", b"9", b"-", b'"', b"[", b"},{", b"\\ud800", b"null"]),
            )
        )
    accepted(sealed(bytes(body)))
