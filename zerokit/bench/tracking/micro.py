"""Files of pytest-benchmark (`--benchmark-json`) in MLflow: a run for each file, and below it one for each benchmark.

So one benchmark compares over commits and machines by its parameter `fullname`, and peers of one file by `group`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zerokit.bench.record.record import RecordError
from zerokit.bench.record.schema import Count, Number, from_plain
from zerokit.bench.tracking.content import NOTE, PARAM_LENGTH, TAG_LENGTH, Point, Tag, moment_of
from zerokit.bench.tracking.store import Store
from zerokit.documents import parse_json, read_text
from zerokit.text import printable

FILE = "benchmark.json"
MAIN = "median_s"
"""The metric in whose order a file's benchmarks are listed."""
_MEMBERS = ("machine_info", "commit_info", "benchmarks", "datetime", "version")
_SOURCE = {"mlflow.source.name": "pytest-benchmark", "mlflow.source.type": "LOCAL"}
_NAME_LENGTH = 250


@dataclass(frozen=True, slots=True)
class Stats:
    """Seconds of a benchmark's rounds, and how many there were."""

    median: Number
    mean: Number
    stddev: Number
    min: Number
    max: Number
    rounds: Count
    iterations: Count


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A line of the table."""

    name: str
    fullname: str
    stats: Stats
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """What was measured."""

    id: str
    branch: str | None = None
    dirty: bool | None = None


@dataclass(frozen=True, slots=True)
class Suite:
    """The members of such a file that are logged."""

    machine_info: dict[str, Any]
    commit_info: Commit
    benchmarks: list[Benchmark]
    datetime: str
    version: str


@dataclass(frozen=True, slots=True)
class SuiteFile:
    """A file, and what is in it."""

    text: str
    suite: Suite

    @property
    def digest(self) -> str:
        """What its runs are found by."""
        return hashlib.blake2b(self.text.encode(), digest_size=16).hexdigest()


def read_suite(path: Path) -> SuiteFile | None:
    """The file of pytest-benchmark at `path`; None if it does not look like one.

    Raises `RecordError`, naming the first invalid member, if it does.
    """
    try:
        plain = parse_json(text := read_text(path))
    except (OSError, ValueError):
        return None
    if not (isinstance(plain, dict) and plain.keys() >= set(_MEMBERS)):
        return None
    try:
        json.dumps(plain, ensure_ascii=False).encode()  # an escape may be half of a surrogate pair
        return SuiteFile(text, from_plain(Suite, plain, others="ignore"))
    except ValueError as error:
        raise RecordError(f"{path}: malformed file of pytest-benchmark: {error}") from error


def push_suite(
    store: Store, file: SuiteFile, own: Mapping[str, str]
) -> tuple[Literal["new", "completed", "there"], str]:
    """Write a file to its runs, which have the tags `own`; returns what was done, and the id of the file's run."""
    suite, digest, moment = file.suite, file.digest, moment_of(file.suite.datetime)
    tags = {Tag.KIND: "benchmarks", Tag.RECORD: digest}
    common, own = _params(suite), {**own, **_SOURCE}
    begun = store.find(tags)
    if begun is not None and Tag.COMPLETE in begun.data.tags:
        return "there", str(begun.info.run_id)
    name = f"{common['commit'][:10]} on {common['machine']}"
    parent = (
        str(begun.info.run_id) if begun else store.create(name[:_NAME_LENGTH], tags | own, moment or None)
    )
    store.write(parent, params=common, tags={NOTE: _note(suite)}, files={FILE: file.text})
    for index, one in enumerate(suite.benchmarks):
        mark = {Tag.RECORD: f"{digest}/{index}", Tag.PARENT: parent}
        found = store.find(mark)
        if found is not None and Tag.COMPLETE in found.data.tags:
            continue
        made = (
            found.info.run_id if found else store.create(one.name[:_NAME_LENGTH], mark | own, moment or None)
        )
        named = {"group": one.group or "", "name": one.name, "fullname": one.fullname}
        params = common | {key: value[:PARAM_LENGTH] for key, value in named.items()}
        store.write(made, params=params, points=_points(one, moment))
        store.client.set_terminated(made, "FINISHED", moment or None)
        store.write(made, tags={Tag.COMPLETE: digest})
    store.client.set_terminated(parent, "FINISHED", moment or None)
    store.write(parent, tags={Tag.COMPLETE: digest})
    return "new" if begun is None else "completed", parent


def _params(suite: Suite) -> dict[str, str]:
    """The machine and the commit, as far as the file knows them."""
    machine, commit = suite.machine_info, suite.commit_info
    processor = machine.get("cpu")
    processor = processor if isinstance(processor, dict) else {}
    found = {
        "commit": f"{commit.id}{'-dirty' if commit.dirty else ''}",
        "branch": commit.branch,
        "machine": machine.get("node"),
        "processor": processor.get("brand_raw") or machine.get("processor"),
        "cores": processor.get("count"),
        "system": f"{machine.get('system', '')} {machine.get('release', '')}".strip(),
        "python": machine.get("python_version"),
        "pytest_benchmark": suite.version,
    }
    return {name: "" if value is None else str(value)[:PARAM_LENGTH] for name, value in found.items()}


def _points(one: Benchmark, moment: int) -> list[Point]:
    stats = one.stats
    seconds = {name: getattr(stats, name) for name in ("median", "mean", "stddev", "min", "max")}
    found = {f"{name}_s": value for name, value in seconds.items()} | {
        "rounds": stats.rounds,
        "iterations": stats.iterations,
    }
    return [Point(name, float(value), moment, 0) for name, value in found.items()]


def _note(suite: Suite) -> str:
    """The table in Markdown, group by group, the fastest first, as the plug-in prints it."""
    text = "| group | benchmark | median, s | stddev, s | rounds |\n|---|---|---|---|---|\n"
    for one in sorted(suite.benchmarks, key=lambda one: (one.group or "", one.stats.median)):
        cells = [
            one.group or "",
            one.name,
            f"{one.stats.median:.3g}",
            f"{one.stats.stddev:.2g}",
            one.stats.rounds,
        ]
        row = "".join(f"| {printable(str(cell)).replace('|', '&#124;')} " for cell in cells)
        if len(text) + len(row) + 4 > TAG_LENGTH:
            return f"{text}…"
        text += f"{row}|\n"
    return text
