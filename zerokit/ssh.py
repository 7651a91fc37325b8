"""How zerokit calls ssh: never asking a question, and ending when the other machine is silent."""

from __future__ import annotations

from collections.abc import Sequence


def ssh_command(host: str, options: Sequence[str], connect_seconds: float, line: str) -> tuple[str, ...]:
    """The words that run a line of the user's shell on a host; `options` are ssh's own, as on its command line."""
    patience = (
        "-o", "BatchMode=yes",
        "-o", f"ConnectTimeout={max(1, round(connect_seconds))}",
        "-o", "ServerAliveInterval=5",
        "-o", "ServerAliveCountMax=3",
    )  # fmt: skip
    return ("ssh", "-T", *options, *patience, "--", host, line)
