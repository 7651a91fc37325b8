"""`node.json`: read back as written, and refused by what is wrong, whatever its checksum."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import sealed
from tests.support.dealt import deal
from tests.support.mutations import put
from zerokit.checkpoint.manifest import MAX_STEP
from zerokit.checkpoint.nodes.record import NODE_NAME, NodeRecord, parse_record, read_record
from zerokit.errors import CheckpointError


@pytest.fixture
def record(step: Path, tmp_path: Path) -> NodeRecord:
    found = read_record(deal(step, tmp_path, nodes=4)[2] / step.name)
    assert found is not None
    return found


def test_a_record_is_read_back_as_written(step: Path, record: NodeRecord) -> None:
    content = record.to_bytes()
    assert parse_record(content, NODE_NAME) == record
    newer = json.loads(content) | {"version": [1, 9], "colour": "green"}
    assert parse_record(sealed(newer), NODE_NAME) == record
    assert read_record(step) is None


def test_no_changed_byte_is_taken(record: NodeRecord) -> None:
    content, generator = record.to_bytes(), random.Random(0)
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << generator.randrange(8)
        with pytest.raises(CheckpointError, match="here: damaged, or none of zerokit's"):
            parse_record(bytes(changed), "here")
        with pytest.raises(CheckpointError, match="here: damaged, or none of zerokit's"):
            parse_record(content[:place], "here")


REFUSALS: dict[str, tuple[Callable[[Any], None], str]] = {
    "another format": (put("format", value="zerokit.checkpoint"), "format is 'zerokit.checkpoint', expected"),
    "another major version": (
        put("version", value=[2, 0]),
        "version is 2.0, this zerokit reads 1.x: use a new",
    ),
    "a run with a path": (put("run", value="../../etc"), "is no hexadecimal number"),
    "a checksum in capitals": (put("manifest_crc32", value="ABCDEF01"), "is no hexadecimal number"),
    "a step too far": (put("step", value=MAX_STEP + 1), "'step' is 576460752303423489, expected 0 to"),
    "a time before time": (put("saved", value=-1), "'saved' is -1, expected 0 to"),
    "a node that is not there": (put("node", value=4), "'node' is 4, expected 0 to 3"),
    "a rank twice": (put("wrote", 0, value=[0, 0]), "'wrote' does not have every rank once"),
    "a rank nowhere": (put("wrote", 3, value=[6]), "'wrote' does not have every rank once"),
    "a rank that is not there": (
        put("holds", 0, value=[8]),
        "'holds' does not list ranks from 0 to 7 by node",
    ),
    "a negative rank": (put("holds", 0, value=[-1]), "'holds' does not list ranks from 0 to 7 by node"),
    "a truth as a rank": (put("holds", 0, value=[True]), "an element of 'holds' is 'True', expected int"),
    "too few nodes": (put("holds", value=[[0]]), "'holds' has 1 nodes, 'wrote' 4"),
    "no nodes": (put("wrote", value=[]), "'wrote' does not list ranks from 0 to 7 by node"),
    "a name that is none": (put("uncut", 0, value=[7]), "an element of 'uncut' is '7', expected str"),
    "no names": (put("uncut", value=None), "'uncut' is 'None', expected list"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_malformed_record_is_refused_although_its_checksum_is_right(record: NodeRecord, case: str) -> None:
    change, message = REFUSALS[case]
    plain = json.loads(record.to_bytes())
    change(plain)
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_record(sealed(plain), "there/node.json")
    assert str(caught.value).startswith("there/node.json: not valid: ")


def test_a_malformed_text_is_refused_although_its_checksum_is_right() -> None:
    for body in (
        b"",
        b'"a":1,"a":2}',
        b'"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}",
        b'"a":"\xff"}',
        b'"a":1}{}',
    ):
        with pytest.raises(CheckpointError, match="here: not valid"):
            parse_record(sealed(body), "here")
