"""The JSON Schema that is shipped describes what records are, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import zerokit.bench.record
from tests.bench.records import make_record, make_sweep
from tests.support.mutations import put
from zerokit.bench.record.record import Record, RecordError, record_schema

SHIPPED = Path(zerokit.bench.record.__file__).with_name("record.schema.json")
WRITE = "from zerokit.bench.record.record import record_schema; print(record_schema(), end='')"


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(SHIPPED.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_shipped_schema_is_the_one_of_the_dataclasses() -> None:
    assert SHIPPED.read_text(encoding="utf-8") == record_schema(), (
        f'write it anew: python -c "{WRITE}" > {SHIPPED}'
    )


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
def test_it_refuses_what_the_reader_refuses_by_the_name_of_the_fault(
    validator: jsonschema.Draft202012Validator, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    content = json.loads(make_record().to_json())
    change(content)
    assert not validator.is_valid(content)
    with pytest.raises(RecordError, match=message):
        Record.from_json(json.dumps(content))
