"""`zerokit prune`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(
    epilog="Exit code 0: done, or nothing to do. 1: something cannot be removed, or RUN is not a run."
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--keep-last", type=click.IntRange(min=1), metavar="K", help="Remove all steps except the newest K."
)
@click.option(
    "--keep-every", type=click.IntRange(min=1), metavar="M", help="Also keep steps that are multiples of M."
)
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print only the result, as JSON, on stdout.")
def command(run: Path, keep_last: int | None, keep_every: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove files that killed writers left in RUN and, with --keep-last, older steps.

    The newest step, the newest step with optimizer states and the step that `latest` names always stay. Steps that a
    restarted training has superseded are removed. Files with other names are not touched. Unfinished saves of living
    processes are listed and stay; so do those of the last hour whose process cannot be checked from here.
    """
    from zerokit.checkpoint.prune import Retention, plan
    from zerokit.cli.text import decimal_size
    from zerokit.text import printable

    if keep_every is not None and keep_last is None:
        raise click.UsageError("--keep-every M needs --keep-last K: without it no step is removed.")
    pruning = plan(run, Retention(keep_last, keep_every), dry_run=dry_run)
    for doomed in pruning.removed:
        if not dry_run:
            doomed.remove()
        if not as_json:
            why = f"; {doomed.leftover.describe()}" if doomed.leftover else ""
            verb = "would remove" if dry_run else "removed"
            click.echo(printable(f"{verb} {doomed.path}: {decimal_size(doomed.size)}{why}"))
    if as_json:
        left = [{"path": str(path), "reason": reason} for path, reason in pruning.left]
        removed = [
            {"path": str(one.path), "kind": "leftover" if one.leftover else "step", "bytes": one.size}
            for one in pruning.removed
        ]
        plain = {"run": str(run), "dry_run": dry_run, "bytes": pruning.bytes}
        click.echo(json.dumps(plain | {"removed": removed, "left": left}, indent=2))
        return
    for path, reason in pruning.left:
        click.echo(printable(f"left {path}: {reason}"))
    verb = "would be freed" if dry_run else "freed"
    click.echo(printable(f"{run}: {decimal_size(pruning.bytes)} {verb}"))
