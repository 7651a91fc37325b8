"""`zerokit consolidate`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(epilog="The output is synced to the disk and appears whole or not at all.")
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="A new directory for the weights."
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    help="Dtype of all floating-point tensors.  [default: each tensor's own in the model]",
)
@click.option(
    "--stream",
    default="master",
    show_default=True,
    help="What the weights are taken from: master, or ema for the average that zerokit.Ema kept.",
)
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    help="Largest file, such as 300MB, 5GB (10^9) or 5GiB (2^30).",
)
@click.option(
    "--like",
    type=click.Path(path_type=Path),
    metavar="MODEL_DIR",
    help="Copy configuration and tokenizer from this folder, whose weights, if any, must have the same shapes.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Threads for copying.  [default: up to 4]")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run to the same output.")
@click.option("--json", "as_json", is_flag=True, help="Print the result on stdout as JSON.")
def command(
    checkpoint: Path,
    output: Path,
    dtype: str | None,
    stream: str,
    max_shard_size: str,
    like: Path | None,
    jobs: int | None,
    force: bool,
    resume: bool,
    as_json: bool,
) -> None:
    """Write the weights of CKPT, a step or a run's newest, for Hugging Face's loaders.

    The result is model.safetensors, or several such files with an index. Only the first of tied weights is written.
    With --like, the folder is one that from_pretrained takes.
    """
    from zerokit.checkpoint.consolidate import consolidate, parse_size
    from zerokit.cli.work import print_output, working
    from zerokit.errors import UsageError

    try:
        limit = parse_size(max_shard_size)
    except UsageError as error:
        raise click.BadParameter(str(error), param_hint="--max-shard-size") from None
    with working("consolidating") as progress:
        written = consolidate(
            checkpoint,
            output,
            dtype=dtype,
            stream=stream,
            max_shard_size=limit,
            like=like,
            force=force,
            resume=resume,
            jobs=jobs,
            progress=progress,
        )
    print_output(written, as_json)
