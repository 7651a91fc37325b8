"""`zerokit convert`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(epilog="The output is synced to the disk and appears whole or not at all.")
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.argument("output", metavar="OUTPUT", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["zerokit", "huggingface", "dcp", "deepspeed"]),
    default="zerokit",
    show_default=True,
    help="What to write: deepspeed only from DeepSpeed, huggingface has the weights alone.",
)
@click.option("--to", "world", type=click.IntRange(min=1), help="Number of ranks.  [default: as CKPT]")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    help="huggingface: dtype of all floating-point tensors.  [default: each tensor's own in the model]",
)
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    help="huggingface: largest file, such as 300MB, 5GB (10^9) or 5GiB (2^30).",
)
@click.option(
    "--like",
    type=click.Path(path_type=Path),
    metavar="MODEL_DIR",
    help="huggingface: copy configuration and tokenizer from this folder.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Threads for copying.  [default: up to 4]")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run to the same output.")
@click.option("--json", "as_json", is_flag=True, help="Print the result on stdout as JSON.")
def command(
    checkpoint: Path,
    output: Path,
    form: str,
    world: int | None,
    dtype: str | None,
    max_shard_size: str,
    like: Path | None,
    jobs: int | None,
    force: bool,
    resume: bool,
    as_json: bool,
) -> None:
    """Write CKPT in another format, or the same one for another number of ranks.

    CKPT is a checkpoint of zerokit, of DeepSpeed at stage 1, 2 or 3, of PyTorch's DCP as FSDP2, accelerate and
    torchtitan write it, or a Hugging Face folder. Masters, moments, step counts, frozen parameters and buffers are
    copied and verified; no framework is imported and no pickle is executed.
    """
    from zerokit.checkpoint.formats.convert import convert
    from zerokit.cli.text import counted
    from zerokit.cli.work import print_output, working
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
            jobs=jobs,
            force=force,
            resume=resume,
            progress=progress,
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
    line = f"{done.output}: step {done.step} of {done.source_format} as {done.format}{ranks}, verified and synced"
    click.echo(printable(line), err=True)
