"""The record keeps every number, is written whole or not at all, and is what its JSON Schema describes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter

from tests.bench.records import make_cell, make_record, make_sweep
from tests.support.mutations import put
from zerokit.bench.record.measured import Results
from zerokit.bench.record.record import (
    Record,
    RecordError,
    read_record,
    summarise,
    write_record,
)


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "record.json"
    write_record(make_record(), path)
    assert read_record(path) == make_record()
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]


def on_devices(*identities: str | None, device: str = "NVIDIA H100 80GB HBM3") -> Results:
    """Results of four ranks on two nodes of two, at a known MFU if each had a device of its own."""
    cell = make_cell(device="cuda", precision="bf16", nproc_per_node=2)
    assert cell.model is not None
    ranks = [
        replace(rank, node=rank.rank // 2, device_id=identity, device=device)
        for rank, identity in zip(cell.ranks, identities, strict=True)
    ]
    return summarise(cell.settings, cell.model, ranks, cell.loss)


def test_utilisation_counts_devices_and_not_ranks() -> None:
    own, shared = on_devices("GPU-a", "GPU-b", "GPU-c", "GPU-d"), on_devices(*["GPU-a"] * 4)
    assert (own.devices, shared.devices) == (4, 1)
    assert own.throughput_per_device == own.throughput_per_rank
    assert shared.throughput_per_device == shared.throughput == own.throughput
    assert own.utilisation is not None
    assert shared.utilisation is not None
    assert shared.utilisation.mfu == pytest.approx(4 * own.utilisation.mfu)


@pytest.mark.parametrize(
    ("identities", "devices"),
    [
        (("0", "1", "0", "1"), 4),  # an index is one device's on its node
        (("0", "0", "0", "0"), 2),
        (("GPU-a", "GPU-b", "GPU-a", "GPU-b"), 2),  # simulated nodes share their machine's
        (("MIG-a", "MIG-b", "MIG-c", "MIG-c"), 3),
        (("GPU-a", None, "GPU-a", "GPU-b"), None),
        ((None, None, None, None), None),
    ],
)
def test_devices_are_told_apart(identities: tuple[str | None, ...], devices: int | None) -> None:
    assert on_devices(*identities).devices == devices


def test_a_record_from_before_devices_were_noted_keeps_its_utilisation() -> None:
    before, now = on_devices(None, None, None, None), on_devices("GPU-a", "GPU-b", "GPU-c", "GPU-d")
    assert before.utilisation == now.utilisation is not None
    assert before.throughput_per_device is None
    content = json.loads(make_record().to_json())
    for rank in content["ranks"]:
        del rank["device_id"]
    del content["results"]["devices"], content["results"]["throughput_per_device"]
    assert Record.from_json(json.dumps(content)) == make_record()


def test_a_slice_of_a_device_and_devices_of_several_kinds_have_no_utilisation() -> None:
    four = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
    assert on_devices(*four, device="NVIDIA H100 80GB HBM3 MIG 1g.10gb").utilisation is None
    cell = make_cell(device="cuda", precision="bf16")
    assert cell.model is not None
    mixed = [cell.ranks[0], replace(cell.ranks[1], device="NVIDIA A100-SXM4-80GB")]
    assert summarise(cell.settings, cell.model, mixed, cell.loss).utilisation is None


def test_numbers_that_are_not_finite_become_null() -> None:
    record = make_record(loss=[5.5, math.nan, math.inf, 3.5])
    text = record.to_json()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] == [5.5, None, None, 3.5]
    assert Record.from_json(text).loss == [5.5, None, None, 3.5]


def test_a_write_that_fails_leaves_the_old_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(make_record(), path)
    unwritable = replace(make_record(), created=object())  # type: ignore[arg-type]  # JSON cannot hold it
    with pytest.raises(TypeError):
        write_record(unwritable, path)
    assert read_record(path) == make_record()
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = TypeAdapter(Record).json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_it_accepts_records_of_every_kind(validator: jsonschema.Draft202012Validator) -> None:
    records = [make_record(), *make_sweep()]
    assert {record.status for record in records} == {"ok", "out of memory", "unsupported", "failed"}
    for record in records:
        validator.validate(json.loads(record.to_json()))


def test_fields_with_a_default_may_be_absent(validator: jsonschema.Draft202012Validator) -> None:
    content = json.loads(make_record().to_json())
    kept = {name: content[name] for name in ("id", "cell", "status", "created", "settings", "format")}
    validator.validate(kept)
    assert Record.from_json(json.dumps(kept)).ranks == []


DAMAGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda content: content.pop("cell"), "cell: missing"),
    (lambda content: content["ranks"][1].pop("pid"), r"ranks\[1\].pid: missing"),
    (put("status", value="fine"), "status"),
    (put("format", value="zerokit.bench/2"), "format 'zerokit.bench/2', expected 'zerokit.bench/1'"),
    (put("traffic", "more", value=1), "traffic.more: no such field"),
    (put("ranks", value={}), "ranks: expected a list, found dict"),
    (put("ranks", 0, "step_ms", value="fast"), "step_ms"),
    (put("ranks", 0, "step_ms", 0, value=None), r"step_ms\[0\]"),
    (put("ranks", 0, "memory_bytes", value=[]), "memory_bytes: expected an object"),
    (put("settings", "stage", value=True), "settings.stage: expected a valid integer, found True"),
    (put("settings", "batch_size", value=1.5), "settings.batch_size"),
    (put("results", "step", "p50", value=None), "results.step.p50"),
    (put("environment", "packages", "torch", value=2.13), "environment.packages.torch"),
    (put("model", value=3), "model: expected an object, found 3"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGES)
def test_the_reader_names_the_fault(change: Callable[[dict[str, Any]], object], message: str) -> None:
    content = json.loads(make_record().to_json())
    change(content)
    with pytest.raises(RecordError, match=message):
        Record.from_json(json.dumps(content))
