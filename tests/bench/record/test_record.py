"""The record keeps every number, is written whole or not at all, and is what its JSON Schema describes; progress."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from pydantic import TypeAdapter

from tests.bench.records import make_cell, make_record, make_sweep
from zerokit.bench.record.measured import Results
from zerokit.bench.record.metrics import metrics_of
from zerokit.bench.record.record import Record, read_record, summarise, write_record
from zerokit.bench.record.status import Progress, read_progress, write_progress


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


FOUR = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


@pytest.mark.parametrize(
    ("identities", "devices"),
    [
        (FOUR, 4),
        (("GPU-a",) * 4, 1),
        (("GPU-a", "GPU-b", "GPU-a", "GPU-b"), 2),  # simulated nodes share their machine's
        (("MIG-a", "MIG-b", "MIG-c", "MIG-c"), 3),
        (("GPU-a", None, "GPU-a", "GPU-b"), None),  # ranks are counted
    ],
)
def test_utilisation_counts_devices_and_not_ranks(
    identities: tuple[str | None, ...], devices: int | None
) -> None:
    own, found = on_devices(*FOUR), on_devices(*identities)
    assert found.devices == devices
    assert found.throughput_per_device == (None if devices is None else own.throughput / devices)
    assert found.utilisation is not None
    assert own.utilisation is not None
    assert found.utilisation.mfu == pytest.approx(4 / (devices or 4) * own.utilisation.mfu)


def test_a_slice_of_a_device_and_devices_of_several_kinds_have_no_utilisation() -> None:
    assert on_devices(*FOUR, device="NVIDIA H100 80GB HBM3 MIG 1g.10gb").utilisation is None
    cell = make_cell(device="cuda", precision="bf16")
    assert cell.model is not None
    mixed = [cell.ranks[0], replace(cell.ranks[1], device="NVIDIA A100-SXM4-80GB")]
    assert summarise(cell.settings, cell.model, mixed, cell.loss).utilisation is None


def test_numbers_that_are_not_finite_become_null() -> None:
    record = make_record(loss=[5.5, math.nan, math.inf, 3.5])
    text = record.to_json()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] == [5.5, None, None, 3.5]
    assert Record.from_json(text).loss == [5.5, None, None, 3.5]


def test_a_write_that_fails_leaves_the_old_record_and_links_and_pipes_stay(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(make_record(), path)
    unwritable = replace(make_record(), created=object())  # type: ignore[arg-type]  # JSON cannot hold it
    with pytest.raises(TypeError):
        write_record(unwritable, path)
    assert read_record(path) == make_record()
    assert list(tmp_path.iterdir()) == [path]
    (link := tmp_path / "link.json").symlink_to(path.name)
    os.mkfifo(pipe := tmp_path / "pipe.json")
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        for place in (link, pipe):
            write_record(replace(make_record(), id="new"), place)
        assert Record.from_json(reader.read()) == read_record(path)
    assert (link.is_symlink(), read_record(path).id) == (True, "new")


def test_the_schema_accepts_records_of_every_kind_and_fields_with_a_default_may_be_absent() -> None:
    schema = TypeAdapter(Record).json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    records = [make_record(), *make_sweep()]
    assert {record.status for record in records} == {"ok", "out of memory", "unsupported", "failed"}
    for record in records:
        validator.validate(json.loads(record.to_json()))
    content = json.loads(make_record().to_json())
    kept = {name: content[name] for name in ("id", "cell", "status", "created", "settings", "format")}
    validator.validate(kept)
    assert Record.from_json(json.dumps(kept)).ranks == []


def test_records_from_before_the_choice_of_an_optimizer_are_of_adamw() -> None:
    content = json.loads(make_cell().to_json())
    del content["settings"]["optimizer"], content["phases"]["optimizer_share"]
    record = Record.from_json(json.dumps(content))
    assert record.settings.optimizer == "adamw"
    assert record.phases is not None
    assert record.phases.optimizer_share is None
    assert "phase/optimizer_share" not in metrics_of(record)
    assert metrics_of(make_cell())["phase/optimizer_share"] == pytest.approx(0.09 / 0.88)


def test_the_reader_sees_the_newest_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    assert read_progress(path) is None
    first, second = Progress(1, 9, 2, 5.5, 100.0), Progress(2, 9, 2, 5.0, 90.0)
    for step in (*[first] * 30, second):
        write_progress(path, step)
    assert read_progress(path) == second
    with path.open("a") as file:
        file.write("[3, 9, 2, 4")
    assert read_progress(path) == second
    with path.open("a") as file:
        file.write(".5, 80.0]\n")
    assert read_progress(path) == Progress(3, 9, 2, 4.5, 80.0)
