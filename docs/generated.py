"""A hook of MkDocs: appends the doctor's codes, and every command's help, to the pages that are about them."""

from __future__ import annotations

from typing import Any

import click

from zerokit.cli import COMMANDS, cli
from zerokit.doctor.findings import CHECKS


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Append what is generated to the text of `page`."""
    if page.file.src_uri == "doctor.md":
        return f"{markdown}\n{_codes()}"
    if page.file.src_uri == "reference/commands.md":
        return f"{markdown}\n{_commands()}"
    return markdown


def _codes() -> str:
    rows = [f"| `{check.code}` | {check.title} | {check.why} |" for check in CHECKS.values()]
    return "\n".join(["| Code | Check | Why |", "|---|---|---|", *rows])


def _commands() -> str:
    sections = []
    for name in COMMANDS:
        context = click.Context(cli, info_name="zerokit")
        command = cli.get_command(context, name)
        assert command is not None
        help_text = command.get_help(
            click.Context(command, info_name=name, parent=context, max_content_width=100)
        )
        sections.append(f"## zerokit {name}\n\n```text\n{help_text}\n```")
    return "\n\n".join(sections)
