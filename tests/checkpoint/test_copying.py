"""Ranges moved by threads: the right bytes, the right checksums, and nothing left open when something fails."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from zerokit.checkpoint.copying import Copier
from zerokit.checkpoint.requests import Request
from zerokit.checkpoint.source import Source
from zerokit.errors import CheckpointError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


NOT_ASKED = cast(Source, None)
"""Requests for paths need no source."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(3000))
    return path


def copy_all(source: Path, target: Path, **options: object) -> None:
    """The whole file in two pieces."""
    with Copier(**options) as copier:  # type: ignore[arg-type]
        out = copier.target(target, 3000)
        copier.copy(
            NOT_ASKED, [Request("a", source, 0, 1000, out, 0), Request("b", source, 1000, 2000, out, 1000)]
        )
        copier.release(out)


def open_files() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("what", ["read", "written", "synced", "interrupted"])
def test_a_failure_ends_the_threads_and_closes_the_files(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before, threads = open_files(), set(threading.enumerate())

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    kind: type[BaseException] = CheckpointError
    message = f"(source|out): cannot be {what}: Input/output error"
    if what == "interrupted":
        kind, message = KeyboardInterrupt, "^$"
    else:
        monkeypatch.setattr(os, {"read": "preadv", "written": "pwritev", "synced": "fsync"}[what], fail)
    with pytest.raises(kind, match=message):
        copy_all(source, tmp_path / "out", progress=interrupt if what == "interrupted" else None)
    assert open_files() == before
    assert set(threading.enumerate()) == threads


def test_many_files_are_not_open_at_once(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    preadv = os.preadv

    def count(fd: int, views: Sequence[WriteableBuffer], offset: int) -> int:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", count)
    before = len(os.listdir("/proc/self/fd"))
    with Copier(jobs=2) as copier:
        for number in range(300):
            target = copier.target(tmp_path / f"{number}", 10)
            copier.copy(NOT_ASKED, [Request("all", source, 0, 10, target, 0)])
            copier.release(target)
    assert most - before < 120
    assert len(list(tmp_path.iterdir())) == 301
