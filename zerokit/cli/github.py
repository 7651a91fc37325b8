"""What `zerokit compare --github` tells GitHub Actions: annotations, and a summary on the job's page.

The runner takes every line of a program's output that begins with "::", or has "##[" in it, for a command. Names in
records come from anywhere, so none may reach the output as such a line.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import click

from zerokit.bench.comparison.cells import Cell, warnings_of
from zerokit.bench.comparison.differences import Regression
from zerokit.bench.comparison.tables import markdown, markdown_text, within
from zerokit.cli.work import note
from zerokit.errors import UsageError, ZerokitError
from zerokit.text import printable

Level = Literal["error", "warning", "notice"]

_MARKS = {"error": "❌", "warning": "⚠️", "notice": "✅"}
_MOST_OF_A_LEVEL = 10
"""GitHub shows no more of a step."""
_MOST_BYTES = 1 << 20
"""GitHub refuses a step's summary that is larger."""


def annotation(level: Level, title: str, message: str) -> str:
    """The workflow command that shows a message on the job's page."""
    for character, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        title, message = title.replace(character, code), message.replace(character, code)
    return f"::{level} title={title.replace(':', '%3A').replace(',', '%2C')}::{message}"


def inert_json(text: str) -> str:
    """The same JSON document without any command: its lines begin with quotes, digits and brackets."""
    return text.replace("##[", "##\\u005b")


@contextmanager
def no_commands() -> Iterator[None]:
    """The runner takes nothing for a command that is printed on stdout inside."""
    token = secrets.token_hex(16)
    click.echo(f"::stop-commands::{token}")
    try:
        yield
    finally:
        click.echo(f"::{token}::")


@contextmanager
def annotated_errors(*, err: bool) -> Iterator[None]:
    """Zerokit's errors inside become annotations, with the exit codes that they have anyway."""
    try:
        yield
    except ZerokitError as error:
        click.echo(annotation("error", "zerokit compare", printable(str(error))), err=err)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def report(
    cells: Sequence[Cell],
    broken: Sequence[Regression],
    differing: Sequence[str],
    metrics: Sequence[str],
    *,
    gated: bool,
    err: bool,
) -> None:
    """Print the annotations, on stderr if `err`, and append the summary to the file that GITHUB_STEP_SUMMARY names.

    Without that variable there is no summary, and stderr says so. `gated` says that there was something to check.

    Raises `ZerokitError` if the file cannot be written.
    """
    told: list[tuple[Level, str, str]] = [
        ("error" if one.known else "warning", one.rule.metric, one.message) for one in broken
    ]
    told += [("error", "losses", text) for text in differing]
    if gated and not told:
        told.append(("notice", "zerokit compare", "nothing is worse than allowed"))
    told += [("warning", "zerokit compare", text) for text in warnings_of(cells)]
    for level in _MARKS:
        lines = [annotation(one, title, printable(text)) for one, title, text in told if one == level]
        for line in lines[:_MOST_OF_A_LEVEL]:
            click.echo(line, err=err)
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        note(["GITHUB_STEP_SUMMARY is not set, so there is no summary: this is no step of GitHub Actions"])
        return
    verdicts = [f"- {_MARKS[level]} {markdown_text(text)}" for level, _, text in told]
    lines = ["### zerokit compare", "", *verdicts, "", *markdown(cells, metrics), ""]
    _append(Path(path), lambda size: within(lines, _MOST_BYTES - size))


def _append(path: Path, make: Callable[[int], str]) -> None:
    try:
        with path.open("ab") as file:
            file.write(make(file.tell()).encode())
    except OSError as error:
        raise ZerokitError(f"the summary cannot be written to {path}: {error.strerror}") from error
