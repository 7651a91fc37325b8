"""A launch's folder on other machines: a copy is made from its files, and what ranks write there is sent back."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerokit import files
from zerokit.launch.failures import LaunchError

_MOST_LOG_BYTES = 1 << 20
"""The most that is sent of what was added to a log: its end."""

_PREFIX, _LOCK = "zerokit-member-", ".lock"


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """An empty folder for a copy, removed at the end; those that killed processes have left are removed, too."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), left.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever is alive holds it
            shutil.rmtree(left.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (folder / f"{_LOCK}-new").open("wb") as lock:
            with contextlib.suppress(OSError):  # as on some disks of networks
                fcntl.flock(lock, fcntl.LOCK_EX)
                Path(lock.name).rename(folder / _LOCK)  # only now do others find it
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pack(data: bytes) -> str:
    """Encode bytes as text."""
    return base64.b64encode(zlib.compress(data, 1)).decode()


def pack_folder(folder: Path) -> dict[str, str]:
    """The files of a launch's folder, by name, for copies of it."""
    return {
        path.name: pack(path.read_bytes())
        for path in folder.iterdir()
        if path.is_file() and not path.name.startswith(".")
    }


def put_file(folder: Path, name: str, content: str, *, more: bool = False) -> None:
    """Write a file below `folder`, whole or not at all; `more` appends to it.

    Raises `LaunchError` if it would lie elsewhere.
    """
    data, path = zlib.decompress(base64.b64decode(content)), folder / name
    if name.startswith("/") or folder.resolve() not in path.resolve().parents:
        raise LaunchError(f"a file named {name!r} lies outside the folder of its launch")
    path.parent.mkdir(parents=True, exist_ok=True)
    if more:
        with path.open("ab") as log:
            log.write(data)
    else:
        files.write_aside(path, data, durable=False)


class Changes:
    """What ranks write in a copy of the folder: new files beside their job, and more of their logs."""

    def __init__(self, folder: Path, packed: Mapping[str, str]) -> None:
        """Make the copy in an empty folder."""
        self._folder = folder
        for name, content in packed.items():
            put_file(folder, name, content)
        self._sent = {path: _state(path) for path in folder.iterdir()}

    def take(self, *, logs: bool) -> Iterator[dict[str, Any]]:
        """The arguments of `put_file` for what has changed; long output is shortened to its end."""
        for path in list(self._folder.rglob("*") if logs else self._folder.glob("*")):
            with contextlib.suppress(FileNotFoundError):  # a file that was renamed meanwhile
                if not path.is_file() or path.name.startswith("."):
                    continue
                size, _ = state = _state(path)
                before, self._sent[path] = self._sent.get(path, (0, 0)), state
                if state == before:
                    continue
                more = path.parent != self._folder
                with path.open("rb") as file:
                    if more:
                        file.seek(max(before[0], size - _MOST_LOG_BYTES))
                    content = file.read(size - file.tell())
                yield {
                    "name": path.relative_to(self._folder).as_posix(),
                    "content": pack(content),
                    "more": more,
                }


def _state(path: Path) -> tuple[int, int]:
    seen = path.stat()
    return seen.st_size, seen.st_mtime_ns
