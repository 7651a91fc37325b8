"""A file system that refuses one call that looks at something: opens, reads, looks up or lists."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
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
    seen: int = 0
    refused: list[str] = field(default_factory=list)

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*arguments: Any, **options: Any) -> Any:
            # Through link or descriptor: what is removed meanwhile has another name there.
            path = arguments[0]
            place = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
            writes = name == "open" and arguments[1] & (os.O_CREAT | os.O_DIRECTORY)
            if str(self.folder) in os.fsdecode(place) and not writes:
                self.seen += 1
                if self.seen == self.at:
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


def every_call(work: Work, source: Path, folder: Path, *, removes: bool = False) -> None:
    """Do the work with each of its calls refused in turn: the result is right, or an error names the file."""
    errors, refused = cycle(ERRORS), set()
    before = read_tree(source)
    expected = None
    for at in count(0):  # of none at first
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
        if at and not system.refused:
            break
    assert len(refused) > 3
