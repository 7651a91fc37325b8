"""Text for people: what comes from hostile files is escaped, all output passes through here; and numbers in short."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

# A password may hold "/", "?", "#" and "@", as SQLAlchemy reads it: up to the last "@".
_LOGIN = re.compile(r"(?<=://)(?:[^:/\s]*:[^\s'\"]*|[^/\s?#]*)@")
_NAMES = "password|passwd|pwd|token|secret|api_?key|access_?key|odbc_connect"
_PARAMETER = re.compile(rf"([?&;][\w.-]*(?:{_NAMES})[\w.-]*=)[^&;\s'\"]+", re.IGNORECASE)

_MIB = 2**20

MOST_LETTERS = 2000
"""The limit of one line: a name in a hostile file can have millions."""


def printable(text: str) -> str:
    """The text in one line: control and format characters become escapes such as "\\x1b", and its length has an end.

    A name could move the cursor, change the terminal's title, turn the direction of writing, or begin a line that looks
    like zerokit's own.
    """
    if len(text) > MOST_LETTERS:
        text = f"{text[:MOST_LETTERS]} … ({len(text) - MOST_LETTERS:,} more letters)"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def printable_lines(text: str) -> str:
    """Text of several lines, such as the end of a log, with control characters escaped."""
    return "\n".join(printable(line) for line in text.expandtabs().split("\n"))


def as_seen(text: str) -> str:
    """What a terminal is left with of lines that were drawn again and again, as progress bars are."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def printable_json(text: str) -> str:
    """A JSON document for a terminal, the same for a program: what `printable` escapes is escaped as JSON does."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1] for letter in text
    )


def without_secrets(text: str) -> str:
    """The text with URIs stripped of user, password and token: "postgresql://***@host/db?password=***"."""
    return _PARAMETER.sub(r"\1***", _LOGIN.sub("***@", text))


def without_secrets_named(name: str, value: str) -> str:
    """A variable's value without secrets: "***" where its name says that it is one."""
    return "***" if re.search(_NAMES, name, re.IGNORECASE) else without_secrets(value)


def in_runs(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs of three and more as 4–7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def decimal_size(size_bytes: int) -> str:
    """A size in the largest fitting power of 1000: "2.2 GB"."""
    if size_bytes < 1000:
        return f"{size_bytes} bytes"
    power = min((len(str(size_bytes)) - 1) // 3, 5)
    return f"{size_bytes / 1000**power:.1f} {'bkMGTP'[power]}B"


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 rank, 2 ranks."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ms(value: float) -> str:
    """A time in milliseconds, or in seconds from ten seconds on."""
    return f"{value:,.1f} ms" if abs(value) < 10_000 else f"{value / 1000:,.2f} s"


def mib(size_bytes: float) -> str:
    """A size in MiB; in GiB from ten GiB on, and in KiB below a tenth of a MiB."""
    if 0 < size_bytes < _MIB / 10:
        return f"{size_bytes / 1024:,.1f} KiB"
    if size_bytes >= 10 * 1024 * _MIB:
        return f"{size_bytes / _MIB / 1024:,.1f} GiB"
    return f"{size_bytes / _MIB:,.1f} MiB"


def rate(value: float) -> str:
    """A number without decimals from a hundred on, otherwise with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
