"""Made-up ranks: what a launcher of `zerokit.bench.run.session` looks like, without processes; and an import for real
ones.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from tests.bench.records import make_record
from zerokit.bench.record.record import Record, write_record
from zerokit.bench.record.schema import from_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.status import Progress
from zerokit.bench.run.session import Host


class Stopped(Exception):
    """The user wants no more."""


@dataclass
class Ranks:
    """A launcher whose ranks succeed at once, except where `act` raises or writes something else.

    `asked` are the settings of every launch.
    """

    act: Callable[[Settings, Path], None] = lambda settings, job: None
    asked: list[Settings] = field(default_factory=list)

    def __call__(
        self, module: str, arguments: Sequence[str], *, poll: Callable[[], None], **more: Any
    ) -> None:
        job = Path(arguments[0])
        content = json.loads(job.read_text())
        settings = from_plain(Settings, content["settings"])
        asked = {"nodes": settings.nodes, "nproc_per_node": settings.nproc_per_node, "log_dir": job.parent}
        assert (module, more) == ("zerokit.bench.worker", asked)
        self.asked.append(settings)
        self.act(settings, job)
        poll()
        write_record(record_of(settings, content["sweep"]), job.parent / content["record"])

    @property
    def engines(self) -> list[tuple[str, int]]:
        """The engine and stage of every launch."""
        return [(settings.engine, settings.stage) for settings in self.asked]


def record_of(settings: Settings, sweep: str | None) -> Record:
    """The record of a success, with the settings as ranks resolve them."""
    resolved = replace(settings, precision=settings.precision or "fp32", device="cpu", warmup=1)
    return replace(make_record(), cell=settings.key, settings=resolved, sweep=sweep)


@dataclass
class Watcher:
    """Remembers what it was told."""

    warnings: list[str] = field(default_factory=list)
    shown: list[Progress] = field(default_factory=list)
    lines: list[tuple[int, str, bool]] = field(default_factory=list)
    phase: Mock = field(default_factory=Mock)
    began: Mock = field(default_factory=Mock)

    def show(self, progress: Progress) -> None:
        """A step."""
        self.shown.append(progress)

    def warn(self, text: str) -> None:
        """A warning."""
        self.warnings.append(text)

    def ended(self, number: int, label: str, record: Record, *, before: bool) -> None:
        """The number of the cell, its status, whether it was there already."""
        self.lines.append((number, record.status, before))


def host(ranks: Ranks, watcher: Watcher) -> Host:
    """This test."""
    return Host(launch=ranks, interrupted=lambda: None, interruptions=(Stopped,), watch=watcher)


def import_optimizers() -> None:
    """For ZeroRedundancyOptimizer, without the warnings of compiling functional ones at import (torch 2.13)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        import torch.distributed.optim  # noqa: F401
