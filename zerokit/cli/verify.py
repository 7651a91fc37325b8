"""`zerokit verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from zerokit.checkpoint.verify import Report


@click.command(epilog="Exit code 0: intact. 1: damaged, or not a checkpoint.")
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="Read every step of a run, not only the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print only the report, as JSON, on stdout.")
@click.pass_context
def command(context: click.Context, checkpoint: Path, every: bool, as_json: bool) -> None:
    """Read every byte of CKPT, a step or a run's newest step, and report damaged files, parameters and ranges."""
    from zerokit.checkpoint.verify import verify, verify_all
    from zerokit.cli.text import counted
    from zerokit.cli.work import json_of, working

    with working("verifying") as progress:
        reports = verify_all(checkpoint, progress) if every else (verify(checkpoint, progress),)
    if as_json:
        plain = [{"intact": report.intact} | json_of(report) for report in reports]
        intact = all(report.intact for report in reports)
        click.echo(json.dumps({"intact": intact, "steps": plain} if every else plain[0], indent=2))
    else:
        for report in reports:
            _show(report)
        if unread := sum(report.unread for report in reports):
            click.echo(f"{counted(unread, 'other step')} of the run not read: --all reads every step")
    if not all(report.intact for report in reports):
        context.exit(1)


def _show(report: Report) -> None:
    from zerokit.cli.text import counted, decimal_size
    from zerokit.text import printable

    path = printable(str(report.path))
    for finding in report.findings:
        click.echo(printable(str(finding)))
    if report.without_checksums and report.intact:
        click.echo(
            f"{path}: headers and sizes are right; the format has no checksums, so bytes cannot be verified"
        )
    elif report.intact:
        click.echo(
            f"{path}: intact: step {report.step} of {counted(report.world or 0, 'rank')}, "
            f"{counted(report.slices, 'slice')}, {decimal_size(report.bytes_read)} read"
        )
    else:
        click.echo(f"{path}: damaged: {counted(len(report.findings), 'finding')}")
