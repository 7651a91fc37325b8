"""`zerokit convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zerokit.cli.work import conversion_options, print_output, weights_options, working


@click.command(epilog="The output is synced to disk and appears whole or not at all.")
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.argument("output", metavar="OUTPUT", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["zerokit", "huggingface", "dcp", "deepspeed"]),
    default="zerokit",
    show_default=True,
    help="Output format. deepspeed needs a DeepSpeed source; huggingface has only the weights.",
)
@click.option("--to", "world", type=click.IntRange(min=1), help="Number of ranks.  [default: as CKPT]")
@weights_options("huggingface: ")
@conversion_options
def command(
    checkpoint: Path,
    output: Path,
    form: str,
    world: int | None,
    dtype: str | None,
    max_shard_size: str,
    like: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write CKPT in another format, or in the same format for another number of ranks.

    CKPT is a checkpoint of zerokit, of DeepSpeed at stage 1, 2 or 3, of PyTorch's DCP as FSDP2, accelerate and
    torchtitan write it, or a Hugging Face folder. Masters, moments, step counts, frozen parameters and buffers are
    copied and verified; no framework is imported and no pickle is executed.
    """
    from zerokit.checkpoint.formats.convert import convert
    from zerokit.cli.text import counted
    from zerokit.text import printable

    with working("converting") as progress:
        done = convert(
            checkpoint,
            output,
            format=form,
            world=world,
            dtype=dtype,
            max_shard_size=max_shard_size,
            like=like,
            progress=progress,
            **options,
        )
    print_output(
        done.output,
        as_json,
        format=done.format,
        world=done.world,
        step=str(done.path),
        source={"format": done.source_format, "world": done.source_world},
    )
    ranks = f", {counted(done.world, 'rank')}" if done.format != "huggingface" else ""
    checked = (
        "synced; its source has no checksums"
        if done.source_format == "huggingface"
        else "verified and synced"
    )
    line = f"{done.output}: step {done.step} of {done.source_format} as {done.format}{ranks}, {checked}"
    click.echo(printable(line), err=True)
