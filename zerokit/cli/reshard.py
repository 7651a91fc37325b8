"""`zerokit reshard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zerokit.cli.work import conversion_options, print_output, working


@click.command(epilog="The output is synced to disk and appears whole or not at all.")
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.option("--to", "world", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="A new directory: a step for a step, a run for a run.  [default: beside CKPT, such as run.to-16]",
)
@conversion_options
def command(
    checkpoint: Path,
    world: int,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Cut CKPT, a step or a run's newest, for another number of ranks.

    Writes, byte for byte, what that many ranks would have saved. Every byte copied is verified by its checksum. A
    checkpoint of DeepSpeed or DCP (FSDP2) keeps its format: convert writes another one. zerokit.load and bench
    --resume do not need this: they take a checkpoint of any number of ranks.
    """
    from zerokit.checkpoint.formats.convert import convert
    from zerokit.cli.text import counted, decimal_size
    from zerokit.text import printable

    with working("resharding") as progress:
        done = convert(checkpoint, output, world=world, progress=progress, **options)
    print_output(done.output, as_json, summary=False, world=world, step=str(done.path))
    size = sum(file.stat().st_size for file in done.path.rglob("*") if file.is_file())
    reminder = (
        "zerokit.load and bench --resume read any number of ranks without resharding"
        if done.format == "zerokit"
        else f"in the source's format ({done.format}): zerokit convert writes another one"
    )
    line = (
        f"{done.output}: step {done.step} of {counted(done.source_world, 'rank')} cut for {world:,}, "
        f"{decimal_size(size)}, verified and synced; {reminder}"
    )
    click.echo(printable(line), err=True)
