"""The journal of an elastic job: its progress, stored next to its checkpoints for a later process.

    RUN/elastic/job.json          the identity of the record to be, and the name of its file
    RUN/elastic/part-0000.jsonl   one file a part: its beginning, its steps, the losses up to each save, its end
    RUN/elastic/part-0001.jsonl   after a restart: it begins where a checkpoint was, and repeats the steps since then
    RUN/elastic-0f3a9c12/         a job that is finished, and was followed by another one in RUN

A part is as long as its processes live: each restart begins one, at its own world size. Rank 0 of a part is the only
one that writes steps into its file, so that a process which lives longer than it should disturbs no later part; the
launcher adds how they ended. Losses are on the disk before the checkpoint that follows them is committed: from
whichever checkpoint the job goes on, those of all steps before it are here.

A run may come from somebody else. So it names no path: the record's folder is the user's, and links are not followed.
Standard library only.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from zerokit.bench.record.schema import Count, Number
from zerokit.documents import parse_json, read_text
from zerokit.errors import UsageError
from zerokit.files import make_directories, system, write_aside

FINISHED = "finished"
UNKNOWN = "its processes ended without a report: they were killed, or their machine is gone"
_FOLDER = "elastic"
_JOB = "job.json"
_IDENTITY, _NAME = re.compile(r"[0-9a-f]{32}"), re.compile(r"[^/.][^/]{0,250}\.json")
_PART = re.compile(r"part-(\d{4,9})\.jsonl")


Where = Literal["", "run", "copies"]
"""What a part goes on from; nothing at the beginning of the training."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an elastic job: the training between two restarts.

    Steps count from 1 and samples from 0 through the whole run. `last_step` is the last that it is known to have
    trained, smaller than `first_step` if it came to none; the next part repeats those after the checkpoint it began
    from. `where` says where that was: in the "run", or in "copies" in the nodes' memory. `ended` says why; "finished"
    for the last.
    """

    world: Count
    nodes: Count
    first_step: Count
    last_step: Count
    first_sample: Count
    samples_per_step: Count
    ended: str
    where: Where = ""


@dataclass(slots=True)
class Story:
    """An elastic job: its parts, and each step's figures from the last time it was trained."""

    parts: list[Part] = field(default_factory=list)
    loss: list[Number] = field(default_factory=list)
    gradient_norm: list[Number] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Job:
    """`identity` identifies the job's record and MLflow run; `record` is the record's file."""

    identity: str
    record: Path


def note(part: Path, **line: Any) -> None:
    """Write a line into a part's file, on rank 0; what it says of losses is on disk when this returns.

    `trained` is the last step, `loss` and `gradient_norm` have the figures of the steps from `first` on.
    """
    with part.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        if "loss" in line:
            file.flush()
            os.fsync(file.fileno())


class Journal:
    """The journal of a run's newest job, in the run's directory."""

    def __init__(self, run: Path) -> None:
        self._folder = run / _FOLDER

    def open_job(self, record: Path | None, default: Callable[[], Path]) -> Job:
        """Open the run's job, or begin a new one; raises `UsageError` where it cannot be read or written.

        Its record goes where the user wants, by default beside `default`'s, which a new one has.
        """
        begun = self._begun()
        identity, name = (uuid.uuid4().hex, None) if begun is None else begun
        job = Job(identity, record or (default() if name is None else default().with_name(name)))
        content = {"id": job.identity, "record": job.record.name}
        try:
            make_directories(self._folder)
            write_aside(self._folder / _JOB, json.dumps(content).encode())
        except OSError as error:
            raise UsageError(f"--save: {self._folder} cannot be written: {error.strerror}") from error
        return job

    def _begun(self) -> tuple[str, str] | None:
        """The identity of the unfinished job, and the name of its record; None if there is no job."""
        path = self._folder / _JOB
        try:
            if self._folder.is_symlink():
                raise ValueError("its folder is a link")
            content = parse_json(read_text(path))
            identity, name = content["id"], Path(content["record"]).name
            if not _IDENTITY.fullmatch(identity) or not _NAME.fullmatch(name):
                raise ValueError("it names no job of zerokit's")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path} cannot be read ({error}): move {self._folder} away to start a new job"
            ) from error
        return identity, name

    def count(self) -> int:
        """The number of parts that have begun."""
        return len(self._files())

    def begin_part(self, part: Part) -> Path:
        """Begin a part, whose last step and end follow; returns its file for `note`."""
        make_directories(self._folder)
        for number in itertools.count(self.count()):
            path = self._folder / f"part-{number:04d}.jsonl"
            with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(asdict(part)) + "\n")
                break
        system().sync_directory(self._folder)  # losses that are synced need the file's name
        return path

    def end_part(self, number: int, why: str) -> None:
        """Note why part `number` (from 0) ended; ignored if it never began or already has a reason."""
        files = self._files()
        if number < len(files) and not any(line.get("ended") for line in _lines(files[number])):
            with files[number].open("a", encoding="utf-8") as file:
                # Its writer may have been killed within a line.
                file.write("\n" + json.dumps({"ended": why}) + "\n")

    def story(self) -> Story:
        """The job so far; its newest part counts as finished until its end is noted."""
        story, first = Story(), 0
        files = self._files()
        for number, file in enumerate(files):
            lines = list(_lines(file))
            if not lines or lines[0].keys() | {"where"} != _BEGINNING:
                continue  # killed before its first line was whole
            begun, rest = lines[0], lines[1:]
            step = begun["first_step"] - 1
            if not story.parts or step < first or step > first + len(story.loss):
                # Other benches have trained between, or checkpoints were removed: the history begins here.
                story, first = Story(), step
            del story.loss[step - first :], story.gradient_norm[step - first :]
            last = step
            for line in rest:
                last = max(last, line.get("trained", 0))
                if line.keys() == _LOSSES and line["first"] == first + len(story.loss) + 1:
                    story.loss += line["loss"]
                    story.gradient_norm += line["gradient_norm"]
                    last = max(last, first + len(story.loss))
            why = next((line["ended"] for line in rest if "ended" in line), None)
            why = why or (FINISHED if number == len(files) - 1 else UNKNOWN)
            story.parts.append(Part(**{**begun, "last_step": last, "ended": why}))
        return story

    def finish(self) -> None:
        """Finish the job after its record was written; the next one starts from the beginning."""
        identity, _ = self._begun() or (uuid.uuid4().hex, "")  # a bench that was not started by the command
        if self._folder.exists():
            self._folder.rename(self._folder.with_name(f"{_FOLDER}-{identity[:8]}"))

    def _files(self) -> list[Path]:
        found = [path for path in self._folder.glob("part-*.jsonl") if _PART.fullmatch(path.name)]
        for path in found:
            if not path.is_file() or path.is_symlink():
                raise UsageError(f"{path} is not a file: move {self._folder} away to start a new job")
        return sorted(found, key=lambda path: int(path.stem.removeprefix("part-")))


_BEGINNING = {one.name for one in fields(Part)}
_LOSSES = {"first", "loss", "gradient_norm"}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a part's file."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            content = parse_json(line)
            if isinstance(content, dict) and all(map(_is_noted, content, content.values())):
                yield content


def _is_noted(name: str, value: object) -> bool:
    """Whether a line may have this member."""
    if name == "ended":
        return isinstance(value, str)
    if name == "where":
        return value in get_args(Where)
    if name in ("loss", "gradient_norm"):
        return isinstance(value, list) and all(one is None or isinstance(one, int | float) for one in value)
    return type(value) is int and 0 <= value < 1 << 63
