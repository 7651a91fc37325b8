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
from zerokit.bench.record import Record, RecordError, record_schema

SHIPPED = Path(zerokit.bench.record.__file__).with_name("record.schema.json")
WRITE = "from zerokit.bench.record import record_schema; print(record_schema(), end='')"


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


DAMAGES: list[Callable[[dict[str, Any]], object]] = [
    lambda content: content.pop("cell"),
    lambda content: content.update(status="fine"),
    lambda content: content.update(format="zerokit.bench/2"),
    lambda content: content.update(more=1),
    lambda content: content["ranks"][1].pop("pid"),
    lambda content: content["ranks"][0].update(step_ms="fast"),
    lambda content: content["ranks"][0]["step_ms"].append(None),
    lambda content: content["settings"].update(stage=True),
    lambda content: content["settings"].update(batch_size=1.5),
    lambda content: content["results"]["step"].update(p50=None),
    lambda content: content["environment"]["packages"].update(torch=2.13),
    lambda content: content.update(model=3),
    lambda content: content.update(loss={}),
]


@pytest.mark.parametrize("place", range(len(DAMAGES)))
def test_it_refuses_what_the_reader_refuses(validator: jsonschema.Draft202012Validator, place: int) -> None:
    content = json.loads(make_record().to_json())
    DAMAGES[place](content)
    assert not validator.is_valid(content)
    with pytest.raises(RecordError):
        Record.from_json(json.dumps(content))
