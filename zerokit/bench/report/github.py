"""What `zerokit compare --github` tells GitHub Actions: annotations, and a summary on the job's page.

The runner takes every line of a program's output that begins with "::", or has "##[" in it, for a command. Names in
records come from anywhere, so none may reach the output as such a line.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from zerokit.bench.comparison.cells import Cell, warnings_of
from zerokit.bench.comparison.differences import Regression
from zerokit.bench.comparison.tables import markdown, markdown_text, within
from zerokit.errors import ZerokitError
from zerokit.text import printable

Level = Literal["error", "warning", "notice"]

_MARKS: dict[Level, str] = {"error": "❌", "warning": "⚠️", "notice": "✅"}
_MOST_OF_A_LEVEL = 10
"""GitHub shows no more of a step."""
_MOST_BYTES = 1 << 20
"""GitHub refuses a step's summary that is larger."""


class Annotation(NamedTuple):
    """A message on the job's page; as text it is the workflow command that shows it."""

    level: Level
    title: str
    message: str

    def __str__(self) -> str:
        title, message = self.title, self.message
        for character, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
            title, message = title.replace(character, code), message.replace(character, code)
        return f"::{self.level} title={title.replace(':', '%3A').replace(',', '%2C')}::{message}"


def inert_json(text: str) -> str:
    """The same JSON document without any command: its lines begin with quotes, digits and brackets."""
    return text.replace("##[", "##\\u005b")


@contextmanager
def no_commands(echo: Callable[[str], None]) -> Iterator[None]:
    """The runner takes nothing for a command that is printed inside; `echo` prints a line there."""
    token = secrets.token_hex(16)
    echo(f"::stop-commands::{token}")
    try:
        yield
    finally:
        echo(f"::{token}::")


def annotate(
    cells: Sequence[Cell], broken: Sequence[Regression], differing: Sequence[str], *, gated: bool
) -> list[Annotation]:
    """What is worse than allowed, what is not known, and warnings; `gated` says that there was something to check."""
    told = [
        Annotation("error" if one.known else "warning", one.rule.metric, one.message) for one in broken
    ] + [Annotation("error", "losses", text) for text in differing]
    if gated and not told:
        told.append(Annotation("notice", "zerokit compare", "nothing is worse than allowed"))
    return told + [Annotation("warning", "zerokit compare", text) for text in warnings_of(cells)]


def commands(told: Sequence[Annotation]) -> Iterator[str]:
    """The lines for those that GitHub shows, errors first."""
    for level in _MARKS:
        of_level = [one for one in told if one.level == level]
        yield from (str(one._replace(message=printable(one.message))) for one in of_level[:_MOST_OF_A_LEVEL])


def _appending(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC | os.O_APPEND, 0o666)


def append_summary(
    path: Path, told: Sequence[Annotation], cells: Sequence[Cell], metrics: Sequence[str]
) -> None:
    """Append these and a table to the job's summary; raises `ZerokitError` if the file cannot be written."""
    verdicts = [f"- {_MARKS[one.level]} {markdown_text(one.message)}" for one in told]
    lines = ["### zerokit compare", "", *verdicts, "", *markdown(cells, metrics), ""]
    try:
        with open(path, "wb", opener=_appending) as file:  # it may be a pipe, such as /dev/stdout
            file.write(within(lines, _MOST_BYTES - os.fstat(file.fileno()).st_size).encode())
    except OSError as error:
        raise ZerokitError(f"the summary cannot be written to {path}: {error.strerror}") from error
