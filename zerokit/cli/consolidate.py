"""`zerokit consolidate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zerokit.cli.work import conversion_options, print_output, weights_options, working


@click.command(epilog="The output is synced to disk and appears whole or not at all.")
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="A new directory for the weights."
)
@weights_options("")
@click.option(
    "--stream",
    default="master",
    show_default=True,
    help="Source of the weights: master, or ema for the average kept by zerokit.Ema.",
)
@conversion_options
def command(
    checkpoint: Path,
    output: Path,
    dtype: str | None,
    stream: str,
    max_shard_size: str,
    like: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write the weights of CKPT, a step or a run's newest, for Hugging Face's loaders.

    The result is model.safetensors, or several such files with an index. Only the first of tied weights is written.
    With --like, the folder is one that from_pretrained takes.
    """
    from zerokit.checkpoint.formats.convert import consolidate

    with working("consolidating") as progress:
        written = consolidate(
            checkpoint,
            output,
            dtype=dtype,
            stream=stream,
            max_shard_size=max_shard_size,
            like=like,
            progress=progress,
            **options,
        )
    print_output(written, as_json)
