"""Runs: groups of records that a user named together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zerokit.bench.record.record import FORMAT, Record, RecordError, read_record

_FAMILY = FORMAT.partition("/")[0] + "/"


@dataclass(frozen=True, slots=True)
class Run:
    """Records named together, in the order of their cells; `name` is the user's name for them."""

    name: str
    records: tuple[Record, ...]


def unique(records: Iterable[Record]) -> list[Record]:
    """The records without repetitions: one may lie in several places, such as a sweep's folder and a copy."""
    return list({record.id: record for record in records}.values())


def json_below(folder: Path) -> list[Path]:
    """The .json files below a folder, without hidden ones, by path."""
    found = (path for path in sorted(folder.rglob("*.json")) if path.is_file())
    return [path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts)]


def in_folder(folder: Path) -> Iterator[Record]:
    """Every record below the folder, by path."""
    return (read_record(path) for path in json_below(folder) if is_record(path))


def is_record(path: Path) -> bool:
    """Whether a file claims to be a record, of any version; raises `RecordError` if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not a bench record: {error}") from error
    return isinstance(content, dict) and str(content.get("format", "")).startswith(_FAMILY)
