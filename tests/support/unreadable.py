"""A file system that refuses one call that looks at something: opens, reads, looks up or lists."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import zerokit
from tests.support.crashes import read_tree

ERRORS = (
    *(errno.ESTALE, errno.EIO, errno.EACCES, errno.EMFILE),
    *(errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.EPERM),
)
Work = Callable[[Path, Path], Any]
"""Takes a source and a path for an output, and gives what is to be equal."""

CALLS = ("open", "stat", "lstat", "fstat", "scandir", "listdir", "pread", "preadv")


@dataclass
class Refusing:
    """Call number `at` of those that look at something in `folder` fails with the error `number`, once."""

    folder: Path
    number: int
    at: int
    sites: list[tuple[object, ...]] = field(default_factory=list)
    """Where in the code each call so far came from."""
    refused: list[str] = field(default_factory=list)

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*arguments: Any, **options: Any) -> Any:
            # Through link or descriptor: what is removed meanwhile has another name there.
            path = arguments[0]
            place = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
            writes = name == "open" and arguments[1] & (os.O_CREAT | os.O_DIRECTORY)
            if str(self.folder) in os.fsdecode(place) and not writes:
                self.sites.append((name, *_callers()))
                if len(self.sites) == self.at:
                    self.refused.append(f"{name} {place}")
                    raise OSError(self.number, os.strerror(self.number), place)
            return call(*arguments, **options)

        return looked

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(patch.object(os, name, self._around(name, getattr(os, name))))
            yield


def _callers() -> tuple[tuple[str, int], ...]:
    """The lines of zerokit that are at work, by file and number."""
    found = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if "/zerokit/" in frame.f_code.co_filename:
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _numbers(sites: list[tuple[object, ...]]) -> list[int]:
    """The numbers, from 1 on, of the first and the last call from each site."""
    first = {site: at for at, site in reversed([*enumerate(sites, 1)])}
    last = {site: at for at, site in enumerate(sites, 1)}
    return sorted({*first.values(), *last.values()})


def every_call(work: Work, source: Path, folder: Path, *, removes: bool = False) -> None:
    """Do the work with a call from each line refused in turn: the result is right, or an error names the file."""
    errors, refused = cycle(ERRORS), set()
    before = read_tree(source)
    expected = None
    numbers = [0]  # none at first
    for at in numbers:
        shutil.rmtree(folder / "out", ignore_errors=True)
        run = source if not removes else Path(shutil.copytree(source, folder / f"run-{at}"))
        system = Refusing(run, next(errors), at)
        try:
            with system.active():
                found = work(run, folder / "out")
        except zerokit.CheckpointError as error:
            fault = str(error)
        else:
            fault, expected = "", found if not at else expected
            assert removes or found == expected, system.refused
        if fault:
            place = system.refused[0].split()[1]
            assert place in fault, (system.refused, fault)
            assert not (folder / "out").exists()
            refused.add(place)
        assert removes or read_tree(source) == before
        assert not removes or "step-00000102/manifest.json" in read_tree(run)
        if not at:
            numbers += _numbers(system.sites)
    assert len(refused) > 1
