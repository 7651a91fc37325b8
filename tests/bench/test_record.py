"""The record keeps every number, is written whole or not at all, and refuses what is not one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.records import MIB, make_record
from zerokit.bench.record import FORMAT, Record, RecordError, read_record, write_record


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "record.json"
    write_record(make_record(), path)
    assert read_record(path) == make_record()
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]


def test_results_are_computed_from_the_slowest_rank() -> None:
    results = make_record().results
    assert results is not None
    assert (results.step.count, results.step.p50, results.step.maximum) == (3, 200.0, 300.0)
    assert results.skew.maximum == 10.0
    assert results.throughput == pytest.approx(2 * 4 * 16 / 0.2)
    assert results.throughput_per_rank == pytest.approx(4 * 16 / 0.2)
    assert (results.loss_first, results.loss_last) == (5.5, 3.5)
    assert (results.peak_host_bytes, results.peak_allocated_bytes) == (301 * MIB, None)


def test_numbers_that_are_not_finite_become_null() -> None:
    record = make_record(loss=[5.5, math.nan, math.inf, 3.5])
    text = record.to_json()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] == [5.5, None, None, 3.5]
    assert Record.from_json(text).loss == [5.5, None, None, 3.5]


def test_lists_of_numbers_take_one_line() -> None:
    assert '"step_ms": [100.0, 200.0, 300.0]' in make_record().to_json()


def damaged(change: Any) -> str:
    content = json.loads(make_record().to_json())
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a bench record"),
        ("[]", "format None"),
        ('{"format": "zerokit.bench/2"}', f"format 'zerokit.bench/2', expected '{FORMAT}'"),
        (damaged(lambda content: content.pop("cell")), "cell: missing"),
        (damaged(lambda content: content["ranks"][1].pop("pid")), r"ranks\[1\].pid: missing"),
        (damaged(lambda content: content["traffic"].update(more=1)), "traffic.more: not a field of Traffic"),
        (
            damaged(lambda content: content["settings"].update(stage="2")),
            "settings.stage: expected int, found str",
        ),
        (
            damaged(lambda content: content["settings"].update(stage=True)),
            "settings.stage: expected int, found bool",
        ),
        (damaged(lambda content: content["settings"].update(stage=7)), "stage 7 is unknown"),
        (damaged(lambda content: content.update(ranks={})), "ranks: expected a list, found dict"),
        (damaged(lambda content: content.update(model=3)), "model: expected an object, found int"),
        (
            damaged(lambda content: content["ranks"][0].update(memory_bytes=[])),
            "memory_bytes: expected an object",
        ),
    ],
)
def test_what_is_no_record_is_refused_by_the_name_of_its_fault(text: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        Record.from_json(text)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"missing\.json"):
        read_record(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_bytes(b"\xff")
    with pytest.raises(RecordError, match=r"bad\.json"):
        read_record(tmp_path / "bad.json")


def test_a_write_that_fails_leaves_the_old_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(make_record(), path)
    unwritable = replace(make_record(), created=object())  # type: ignore[arg-type]  # JSON cannot hold it
    with pytest.raises(TypeError):
        write_record(unwritable, path)
    assert read_record(path) == make_record()
    assert list(tmp_path.iterdir()) == [path]
