"""Messages between a launcher and a remote node: one JSON document per line, over a pipe in each direction.

    node -> launcher    hello, file (name, content), exit (code, trouble), alive
    launcher -> node    start, signal (number), and empty lines: the launcher is alive

A node whose pipe closes, or that hears nothing for `SILENCE_SECONDS`, ends what it has started: no rank outlives its
launcher or the connection to it. A launcher that hears nothing of a node for so long gives that node up.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from zerokit import files
from zerokit.errors import ZerokitError

HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 15.0
MOST_LOG_BYTES = 1 << 20
"""Only the end of each log is sent back."""


class FrameError(ZerokitError):
    """Data from the pipe is not a message of zerokit."""


def frame(kind: str, **content: Any) -> bytes:
    """A message as one line."""
    return json.dumps({"zerokit": kind, **content}).encode() + b"\n"


def read_lines(stream: IO[bytes], heard: Callable[[], None]) -> Iterator[bytes]:
    """The lines of a stream; `heard` is called for every piece, because a long line may take long to arrive."""
    line: list[bytes] = []
    while piece := stream.read1(1 << 16):  # type: ignore[attr-defined]  # a BufferedReader's
        heard()
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield b"".join([*line, end, b"\n"])
            line.clear()
        line.append(rest)
    if last := b"".join(line):
        yield last


def parse(line: bytes) -> tuple[str, dict[str, Any]] | None:
    """A line's kind and content; None for other programs' output, such as a login message."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("zerokit"), str):
        return None
    kind: str = content.pop("zerokit")
    return kind, content


def pack(data: bytes) -> str:
    """Encode bytes as text."""
    return base64.b64encode(zlib.compress(data, 1)).decode()


def unpack(text: str) -> bytes:
    """Decode bytes from text; raises `FrameError` if it is damaged."""
    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except (ValueError, zlib.error) as error:
        raise FrameError(f"a file arrived damaged: {error}") from error


def inside(folder: Path, name: str) -> Path:
    """The file `name` below `folder`; raises `FrameError` if it lies outside."""
    path = folder.joinpath(name)
    if name.startswith("/") or folder.resolve() not in path.resolve().parents:
        raise FrameError(f"a node sent a file named {name!r}, which lies outside the folder of its launch")
    return path


def relocate(arguments: Sequence[str], folder: str, here: Path) -> list[str]:
    """A command line with paths in `folder` replaced by those in its copy `here`, also in `--out=PATH`."""
    path = re.compile(rf"(?P<option>(?:-[^=]*=)?){re.escape(folder)}(?P<rest>(?:/.*)?)", re.DOTALL)
    matches = [path.fullmatch(argument) for argument in arguments]
    return [
        argument if match is None else f"{match['option']}{here}{match['rest']}"
        for argument, match in zip(arguments, matches, strict=True)
    ]


def put_file(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the file of a `file` frame, whole or not at all."""
    path = inside(folder, str(content["name"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_aside(path, unpack(str(content["content"])), durable=False)
