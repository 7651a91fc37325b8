"""`zerokit diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from zerokit.checkpoint.diff import Comparison, Difference

_SHOWN = 20
"""Differences of one stream that are listed; two steps of one run differ in every parameter."""


@click.command(
    epilog="Exit code 0: the same state, whatever the world sizes. 1: different. 2: one side cannot be read."
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--json", "as_json", is_flag=True, help="Print all differences on stdout, and nothing else there."
)
@click.pass_context
def command(context: click.Context, a: Path, b: Path, as_json: bool) -> None:
    """Compare the states of A and B, steps or runs, per stream and parameter.

    Streams are compared by the checksums in the manifests, across world sizes, without reading them.
    """
    from zerokit.checkpoint.diff import diff
    from zerokit.cli.text import note
    from zerokit.cli.work import json_of
    from zerokit.errors import CheckpointError
    from zerokit.text import printable

    try:
        comparison = diff(a, b)
    except CheckpointError as error:
        click.echo(f"zerokit: {printable(str(error))}", err=True)
        context.exit(2)
    note(comparison.notes)
    if as_json:
        click.echo(json.dumps({"same": comparison.same} | json_of(comparison), indent=2))
    else:
        _print(comparison)
    if comparison.unread:
        context.exit(2)
    if not comparison.same:
        context.exit(1)


def _print(comparison: Comparison) -> None:
    from zerokit.cli.text import counted
    from zerokit.text import printable

    by_stream: dict[str, list[Difference]] = {}
    for difference in comparison.differences:
        by_stream.setdefault(difference.stream, []).append(difference)
    for stream, differences in by_stream.items():
        for one in differences[:_SHOWN]:
            sides = " → ".join(_short(side) for side in (one.a, one.b) if side is not None)
            click.echo(printable(f"{one.change:7}  {stream}/{one.name}  {sides}"))
        if len(differences) > _SHOWN:
            click.echo(
                f"         and {len(differences) - _SHOWN} more of {printable(stream)} (--json lists all)"
            )
    for line in comparison.layout:
        click.echo(f"layout   {line} (no difference of the state)")
    differ = counted(len(comparison.differences), "difference") if comparison.differences else "no difference"
    click.echo(f"{differ}; {comparison.equal} equal by CRC-32")


def _short(side: str) -> str:
    return side if len(side) <= 60 else f"{side[:59]}…"
