"""A directory on another machine, of which files come with ssh: small ones at once, others when they are wanted.

A copy of its tree lies here, in which files that have not come yet are holes of the right sizes. So all that looks at
names and sizes works as on a directory of this machine. On the other side only sh, ls and cat are needed.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from zerokit.checkpoint.disk import explained, make_directory, write_exactly
from zerokit.checkpoint.latest import LATEST_NAME
from zerokit.checkpoint.manifest import BASE, NAME
from zerokit.checkpoint.nodes.directories import Directory, Report
from zerokit.checkpoint.nodes.record import NODE_NAME
from zerokit.checkpoint.prune import STEP_FILE
from zerokit.checkpoint.run import STEP
from zerokit.errors import CheckpointError, MissingPath
from zerokit.files import path_of, system
from zerokit.ssh import ssh_command

_PLACE = re.compile(r"(?P<host>(?:[\w.-]+@)?(?:\[[0-9A-Fa-f:.]+\]|[\w.-]{2,})):(?P<path>(?!//).*)", re.DOTALL)
"""As scp has it; one letter is a drive of Windows', and two slashes make a URI."""

_CONNECT_SECONDS = 30.0
_LOOK_SECONDS = 0.1
_CHUNK_BYTES = 1 << 20
_MOST_LISTED = 1 << 26
"""Bytes of a listing."""
_STEPS = 4
"""Steps of a run that are looked at, the newest ones. Nodes keep two."""

_DIGITS = 19
"""No file has a size of so many."""

_ABSENT = 9
"""The exit code of the scripts where there is no such directory."""
_LIST = (
    f'cd -- "$1" || exit {_ABSENT}; for d in . step-* frozen-*; do if [ -d "$d" ]; then echo "in $d"; '
    'LC_ALL=C ls -lnq -- "$d/" || exit 1; fi; done'
)
_SEND = f'cd -- "$1" || exit {_ABSENT}; while IFS= read -r f; do cat -- "$f" || exit 1; done'

_REMEDIES = {
    "permission denied": "give this user's key to that host (ssh-copy-id), or name another in ~/.ssh/config",
    "host key verification failed": "connect once by hand (ssh HOST true) to accept the host's key",
    "could not resolve": "check the host's name, or name it in ~/.ssh/config",
}
_OTHERWISE = "is it up, and does `ssh HOST true` work? Otherwise copy the directory here, and name the copy"


def host_and_path(given: str | os.PathLike[str]) -> tuple[str, str] | None:
    """The host and the directory there in `host:path`; None of what is on this machine.

    A path that exists here is one of this machine, whatever is in its name.
    """
    text = os.fspath(given)
    match = _PLACE.fullmatch(text)
    if match is None or match["host"].startswith("-") or os.path.lexists(path_of(text)):
        return None
    return match["host"], match["path"] or "."


class RemoteDirectory(Directory):
    """A directory on `host`. `path` is an empty one here, for what comes."""

    distant = True

    def __init__(self, shown: str, path: Path, host: str, folder: str) -> None:
        super().__init__(shown, path)
        # ssh wants addresses without the brackets that tell their colons from the one before the path.
        self._host = re.sub(r"\[(.*)\]", r"\1", host)
        self._folder = folder.removeprefix("~/")  # ssh begins there
        self._sizes: dict[Path, int] = {}
        """By path here, what is still a hole."""

    def named(self, text: str) -> str:
        return text.replace(str(self.path), self.shown.rstrip("/"))

    def list(self, report: Report | None) -> None:
        """See what is there. Raises `CheckpointError` if the host does not answer, or has no such directory."""
        listing = bytearray()

        def take(content: memoryview) -> None:
            listing.extend(content)
            if len(listing) > _MOST_LISTED:
                raise CheckpointError(f"{self.shown}: is listed in more than {_MOST_LISTED} bytes")

        self._run(_LIST, b"", take, lambda: report and report(0, 0))
        found = dict(_parsed(listing.decode(errors="replace")))
        steps = sorted((name for name in found if STEP.fullmatch(name)), key=lambda name: int(name[5:]))
        for name in (".", *steps[-_STEPS:], *filter(BASE.fullmatch, found)):
            folder = self.path / name
            if name != ".":
                make_directory(folder)
            for file, size in found.get(name, {}).items():
                if name != "." or NAME in found[name] or file == LATEST_NAME:
                    self._sizes[folder / file] = size
                    with explained(folder / file, "laid out"):
                        fd = system().create(folder / file)
                        try:
                            system().truncate(fd, size)
                        finally:
                            os.close(fd)
        self.fetch([path for path in self._sizes if path.name in (NAME, NODE_NAME, LATEST_NAME)], report)

    def fetch(self, files: Sequence[Path], report: Report | None) -> None:
        wanted = [path for path in files if self._sizes.get(path)]
        total = sum(self._sizes[path] for path in wanted)
        if not wanted:
            return
        free = os.statvfs(self.path)
        if total > free.f_bavail * free.f_frsize:
            raise CheckpointError(
                f"{self.path.parent}: {total} bytes are to come from {self.shown}, "
                f"{free.f_bavail * free.f_frsize} are free: make room there, or choose another disk for the output "
                "(without one, TMPDIR)"
            )
        names = "".join(f"{path.relative_to(self.path)}\n" for path in wanted)
        sink = _Sink([(path, self._sizes[path]) for path in wanted])
        try:
            self._run(_SEND, names.encode(), sink.take, lambda: report and report(sink.done, total))
        finally:
            sink.close()
        if sink.done != total:
            raise CheckpointError(
                f"{self.shown}: sent {sink.done} bytes instead of {total}: was a step removed there? Try again"
            )
        for path in wanted:
            del self._sizes[path]

    def drop(self, files: Sequence[Path]) -> None:
        for path in files:
            size = path.stat().st_size
            os.truncate(path, 0)
            os.truncate(path, size)
            self._sizes[path] = size

    def _run(
        self, script: str, stdin: bytes, take: Callable[[memoryview], None], check: Callable[[], object]
    ) -> None:
        """Run a script of sh's in the directory there. `check` is called often; what it raises ends the connection."""
        line = shlex.join(["exec", "sh", "-c", script, "sh", self._folder])
        words = ssh_command(self._host, (), _CONNECT_SECONDS, line)
        with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as errors:
            asked.write(stdin)
            asked.seek(0)
            try:
                process = subprocess.Popen(
                    words, stdin=asked, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
                )
            except OSError as error:
                raise CheckpointError(
                    f"{self.shown}: ssh cannot be run ({error.strerror}): install openssh-client"
                ) from error
            assert process.stdout is not None
            try:
                for content in _chunks(process.stdout.fileno(), check):
                    take(content)
                while (code := process.poll()) is None:
                    check()
                    time.sleep(_LOOK_SECONDS)
            finally:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # a proxy of ssh's as well
                process.stdout.close()
                process.wait()
            if code:
                errors.seek(0)
                raise self._failure(code, errors.read(1 << 16).decode(errors="replace"))

    def _failure(self, code: int, said: str) -> CheckpointError:
        last = (said.strip().splitlines() or [f"exit code {code}"])[-1]
        if code == _ABSENT:
            return MissingPath(
                f"{self.shown}: no such directory on {self._host}, or none to be entered: {last}"
            )
        if code != 255:  # ssh's own
            return CheckpointError(f"{self.shown}: cannot be read there: {last}")
        remedy = next((remedy for words, remedy in _REMEDIES.items() if words in said.lower()), _OTHERWISE)
        return CheckpointError(f"{self.shown}: {self._host} cannot be reached: {last}: {remedy}")


class _Sink:
    """Files one after the other, whose bytes come as one stream."""

    def __init__(self, files: Sequence[tuple[Path, int]]) -> None:
        self._left, self._fd, self._at, self._size = iter(files), -1, 0, 0
        self._path = Path()
        self.done = 0

    def take(self, content: memoryview) -> None:
        while content:
            if self._at == self._size:
                self._open()
            part = content[: self._size - self._at]
            write_exactly(self._fd, [part], self._at, self._path)
            self._at, self.done = self._at + len(part), self.done + len(part)
            content = content[len(part) :]

    def _open(self) -> None:
        self.close()
        try:
            self._path, self._size = next(self._left)
        except StopIteration:
            raise CheckpointError(
                f"{self._path}: more came than its size: is it being written? Try again"
            ) from None
        self._at = 0
        with explained(self._path, "opened"):
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _chunks(fd: int, check: Callable[[], object]) -> Iterator[memoryview]:
    while True:
        check()
        if select.select([fd], [], [], _LOOK_SECONDS)[0]:
            content = os.read(fd, _CHUNK_BYTES)
            if not content:
                return
            yield memoryview(content)


def _parsed(listing: str) -> Iterator[tuple[str, dict[str, int]]]:
    """By directory, the sizes of the regular files that a step or a run may have; all else is passed over."""
    for part in re.split(r"^in ", listing, flags=re.MULTILINE)[1:]:
        name, _, lines = part.partition("\n")
        if name != "." and not STEP.fullmatch(name) and not BASE.fullmatch(name):
            continue
        files = {}
        for line in lines.splitlines():
            mode, *_, size, _, _, _, file = fields if len(fields := line.split(None, 8)) == 9 else [""] * 9
            known = STEP_FILE.fullmatch(file) or file == LATEST_NAME
            if known and mode.startswith("-") and size.isdecimal() and len(size) < _DIGITS:
                files[file] = int(size)
        yield name, files
