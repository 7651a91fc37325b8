"""`zerokit reshard`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(epilog="The output is synced to the disk and appears whole or not at all.")
@click.argument("checkpoint", metavar="CKPT", type=click.Path(path_type=Path))
@click.option("--to", "world", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="A new directory: a step for a step, a run for a run.  [default: beside CKPT, such as run.to-16]",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Threads for copying.  [default: up to 4]")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run to the same output.")
@click.option("--json", "as_json", is_flag=True, help="Print the result on stdout as JSON.")
def command(
    checkpoint: Path,
    world: int,
    output: Path | None,
    jobs: int | None,
    force: bool,
    resume: bool,
    as_json: bool,
) -> None:
    """Cut CKPT, a step or a run's newest, for another number of ranks.

    Writes, byte for byte, what that many ranks would have saved. Every byte copied is verified by its checksum. A
    checkpoint of DeepSpeed or DCP (FSDP2) keeps its format: convert writes another one. zerokit.load and bench
    --resume do not need this: they take a checkpoint of any number of ranks.
    """
    from zerokit.checkpoint.reshard import cut
    from zerokit.cli.text import counted, decimal_size
    from zerokit.cli.work import print_output, working
    from zerokit.text import printable

    with working("resharding") as progress:
        done = cut(checkpoint, world, output, jobs=jobs, force=force, resume=resume, progress=progress)
    print_output(done.output, as_json, summary=False, world=world, step=str(done.path))
    size = sum(file.stat().st_size for file in done.path.rglob("*") if file.is_file())
    taken = f", {decimal_size(done.taken_bytes)} of it finished before" if done.taken_bytes else ""
    reminder = (
        "zerokit.load and bench --resume read any number of ranks, without it"
        if done.format == "zerokit"
        else f"in the source's format ({done.format}): zerokit convert writes another one"
    )
    line = (
        f"{done.output}: step {done.step} of {counted(done.world_before, 'rank')} cut for {world:,}, "
        f"{decimal_size(size)}{taken}, verified and synced; {reminder}"
    )
    click.echo(printable(line), err=True)
