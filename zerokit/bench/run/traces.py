"""The files of timelines (`zerokit bench --timeline FILE`): which cells have one, their names, and who reads them.

Ranks write theirs beside their job, from where it comes to the user's file, with the id of its record. So nothing but
the timeline of a record is ever sent anywhere because the record, which may be somebody else's, names it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerokit.bench.record.record import Record, RecordError, require_writable, write_bytes
from zerokit.bench.record.settings import Settings
from zerokit.bench.trace.events import FORMAT, to_json
from zerokit.errors import UsageError

WRITTEN = "trace.json"
"""The ranks' file, in the folder of their job."""
_MOST_BYTES = 1 << 28
VIEWER = "https://ui.perfetto.dev"


def refusal_of_trace(settings: Settings) -> str | None:
    """Why a cell has no timeline; None if it may have one."""
    if settings.engine != "zerokit":
        return f"a timeline shows the units of zerokit's engine, and {settings.engine} has none: use torch.profiler"
    if settings.every is not None:
        return "a timeline shows a step in which all ranks take part: omit --every"
    return None


def require_traces(path: Path, cells: Iterable[Settings]) -> None:
    """Raise `UsageError` where no cell can have a timeline, or where its file cannot be written."""
    reasons = [refusal_of_trace(cell) for cell in cells]
    if None not in reasons:
        raise UsageError(f"--timeline: {reasons[0]}")
    if path.is_dir():
        raise UsageError(
            f"--timeline {path} is a folder: give the name of a file, such as {path / 'step.json.gz'}"
        )
    try:
        require_writable(path.parent)
    except RecordError as error:
        reason = getattr(error.__cause__, "strerror", None)
        raise UsageError(f"--timeline {path} cannot be written: {path.parent}: {reason}") from error


def traces_written(records: Sequence[Record]) -> dict[str, str]:
    """Where the timelines are, for the lines at a bench's end."""
    paths = [record.trace.file for record in records if record.trace is not None]
    if not paths:
        return {}
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return {"trace": f"{paths[0]}{more}  open in {VIEWER}"}


def keep(record: Record, work: Path, path: Path, warn: Callable[[str], None]) -> Record:
    """Write the ranks' timeline to the user's file, compressed if it ends in .gz; the record that names it.

    If that fails, `warn` gets the reason, and the record names no file.
    """
    if record.trace is None:
        return record
    try:
        content = json.loads((work / record.trace.file).read_text(encoding="utf-8"))
        content["otherData"]["record"] = record.id
        data = to_json(content).encode()
        write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data, path)
    except OSError as error:
        warn(f"the timeline cannot be written to {path}: {error.strerror}")
        return replace(record, trace=None)
    return replace(record, trace=replace(record.trace, file=str(path.absolute())))


def read_trace(record: Record) -> tuple[str, bytes] | None:
    """A record's timeline, with a name that says how it is stored; None if its file is gone or another's."""
    if record.trace is None:
        return None
    path = Path(record.trace.file)
    with suppress(OSError, EOFError, ValueError, KeyError, TypeError):
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        stored = path.read_bytes()
        about: dict[str, Any] = json.loads(_plain(path))["otherData"]
        if (about["format"], about["record"]) == (FORMAT, record.id):
            return f"timeline.json{'.gz' if path.suffix == '.gz' else ''}", stored
    return None


def _plain(path: Path) -> bytes:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return bytes(file.read(_MOST_BYTES))
