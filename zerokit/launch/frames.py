"""Messages between a launcher and others' machines: one JSON document per line, over a pipe or a socket.

    there -> launcher    hello, file (name, content, more: whether to append it), exit (code, failures), alive
    launcher -> there    start, signal (number), end (code), alive

Who is not heard for `SILENCE_SECONDS` is given up, and so is one whose connection closes: no rank outlives its launcher
or the connection to it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from zerokit import files
from zerokit.launch.failures import LaunchError
from zerokit.patience import Patience

HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 15.0
MOST_LOG_BYTES = 1 << 20
"""The most that is sent of what was added to a log: its end."""


def frame(kind: str, **content: Any) -> bytes:
    """A message as one line."""
    return json.dumps({"zerokit": kind, **content}).encode() + b"\n"


class Peer:
    """The other end of a connection: threads read and write its messages, so that no call blocks.

    `other` is called with lines that are no messages, such as those of a login shell.
    """

    def __init__(
        self, incoming: IO[bytes], outgoing: IO[bytes], other: Callable[[bytes], object] = lambda line: None
    ) -> None:
        self._incoming, self._outgoing, self._other = incoming, outgoing, other
        self._unsent: queue.Queue[bytes | None] = queue.Queue()
        self._received: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._gone = False
        self._patience = Patience(SILENCE_SECONDS)
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        for line in self._lines():
            if (message := parse(line)) is None:
                self._other(line)
            elif message[0] != "alive":
                self._received.put(message)
        self._gone = True

    def _lines(self) -> Iterator[bytes]:
        """Every piece is a sign of life, as a long line may take long to arrive."""
        line: list[bytes] = []
        with contextlib.suppress(OSError, ValueError), self._incoming:
            while piece := self._incoming.read1(1 << 16):  # type: ignore[attr-defined]  # a BufferedReader's
                self._patience.restart()
                *ends, rest = piece.split(b"\n")
                for end in ends:
                    yield b"".join([*line, end, b"\n"])
                    line.clear()
                line.append(rest)
        if last := b"".join(line):
            yield last

    def _write(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._outgoing:
            while True:
                try:
                    line = self._unsent.get(timeout=HEARTBEAT_SECONDS)
                except queue.Empty:
                    self.say("alive")
                    continue
                if line is None:
                    break
                self._outgoing.write(line)
                self._outgoing.flush()

    @property
    def silent(self) -> bool:
        """Whether nothing was heard for too long."""
        return self._patience.over

    def hear(self) -> tuple[str, dict[str, Any]] | None:
        """The next message, if any; raises `EOFError` if the other end is gone and all that it said has been heard."""
        gone = self._gone
        try:
            return self._received.get_nowait()
        except queue.Empty:
            if gone:
                raise EOFError from None
            return None

    def say(self, kind: str, **content: Any) -> None:
        """Send a message without waiting."""
        self._unsent.put(frame(kind, **content))

    def close(self) -> None:
        """Close the connection when all messages are written."""
        self._unsent.put(None)


def parse(line: bytes) -> tuple[str, dict[str, Any]] | None:
    """A line's kind and content; None for other programs' output, such as a login message."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("zerokit"), str):
        return None
    kind: str = content.pop("zerokit")
    return kind, content


def pack(data: bytes) -> str:
    """Encode bytes as text."""
    return base64.b64encode(zlib.compress(data, 1)).decode()


def put_file(folder: Path, frame: Mapping[str, Any]) -> None:
    """Write the file of a `file` frame, whole or not at all, or append to a log.

    Raises `LaunchError` if it lies outside of `folder`.
    """
    name, data = str(frame["name"]), zlib.decompress(base64.b64decode(frame["content"]))
    path = folder.joinpath(name)
    if name.startswith("/") or folder.resolve() not in path.resolve().parents:
        raise LaunchError(f"a node sent a file named {name!r}, which lies outside the folder of its launch")
    path.parent.mkdir(parents=True, exist_ok=True)
    if frame.get("more"):
        with path.open("ab") as log:
            log.write(data)
    else:
        files.write_aside(path, data, durable=False)
