"""`zerokit verify`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(epilog="Exit code 0: intact. 1: damaged, or no checkpoint.")
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report on stdout, and nothing else there.")
@click.pass_context
def command(context: click.Context, checkpoint: Path, as_json: bool) -> None:
    """Read every byte of CKPT, a step or a run, and report which file, parameter and range is bad."""
    from zerokit.checkpoint.verify import verify
    from zerokit.cli.text import counted, decimal_size
    from zerokit.cli.work import working
    from zerokit.text import printable

    with working("verifying") as progress:
        report = verify(checkpoint, progress)
    if as_json:
        click.echo(json.dumps(report.plain(), indent=2))
    else:
        path = printable(str(report.path))
        for finding in report.findings:
            click.echo(printable(str(finding)))
        if report.intact:
            click.echo(
                f"{path}: intact: step {report.step} of {counted(report.world or 0, 'rank')}, "
                f"{counted(report.slices, 'slice')}, {decimal_size(report.bytes_read)} read"
            )
        else:
            click.echo(f"{path}: damaged: {counted(len(report.findings), 'finding')}")
    if not report.intact:
        context.exit(1)
