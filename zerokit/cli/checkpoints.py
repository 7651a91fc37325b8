"""`zerokit inspect`, `verify`, `diff` and `prune`: what is on disk, whether it is whole, and what may go."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from zerokit.cli.work import (
    PATH,
    checkpoint_argument,
    json_of,
    json_option,
    note,
    print_json,
    say,
)
from zerokit.errors import CheckpointError
from zerokit.terminal.verdicts import differing, verified
from zerokit.terminal.working import working
from zerokit.text import counted, decimal_size, printable


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


@click.command()
@checkpoint_argument
@json_option("Print only JSON on stdout.")
def inspect(checkpoint: tuple[Path, ...], as_json: bool) -> None:
    """Show the contents of CKPT, a step or a run: step, world size, parameters, streams, files.

    Several CKPT are nodes' own directories, which have a step together, as paths or as host:path (read with ssh). What
    each has is shown, what is missing, and which nodes have that.

    Checkpoints of DeepSpeed, DCP (FSDP2) and Hugging Face are shown, too, and weights in a file of torch.save.

    For a run, the newest step is shown, with a list of all steps and of unfinished saves. Equal layers are shown
    once. Nothing is verified: use verify for that.
    """
    from zerokit.checkpoint.inspect import inspect as summarise

    with working("looking") as progress:
        summary = summarise(checkpoint, progress)
    note(summary.notes)
    if as_json:
        print_json(json_of(summary))
    else:
        from zerokit.terminal.checkpoint import show

        show(summary)


@click.command(epilog="Exit code 0: intact. 1: damaged, incomplete, or not a checkpoint. 2: no such path.")
@checkpoint_argument
@click.option("--all", "every", is_flag=True, help="Read every step of a run, not only the newest.")
@json_option("Print only the report, as JSON, on stdout.")
@click.pass_context
def verify(context: click.Context, checkpoint: tuple[Path, ...], every: bool, as_json: bool) -> None:
    """Read every byte of CKPT, a step or a run's newest step, and report damaged files, parameters and ranges.

    Several CKPT are nodes' own directories, as paths or as host:path (fetched with ssh). All copies are read, and what
    no directory has is reported, too.
    """
    from zerokit.checkpoint import verify as verifying

    with working("verifying") as progress:
        reports = (
            verifying.verify_all(checkpoint, progress) if every else (verifying.verify(checkpoint, progress),)
        )
    for report in reports:
        note(report.notes)
    if as_json:
        plain = [{"intact": report.intact} | json_of(report) for report in reports]
        intact = all(report.intact for report in reports)
        print_json({"intact": intact, "steps": plain} if every else plain[0])
    else:
        _print(line for report in reports for line in verified(report))
        if unread := sum(report.unread for report in reports):
            click.echo(f"{counted(unread, 'other step')} of the run not read: --all reads every step")
    if not all(report.intact for report in reports):
        context.exit(1)


@click.command(
    epilog="Exit code 0: the same state, or the same weights, whatever the world sizes. 1: different. 2: one side "
    "cannot be read."
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option(
    "--weights",
    is_flag=True,
    help="Compare weights and buffers alone, as is always done with a Hugging Face folder.",
)
@json_option("Print all differences on stdout, and nothing else there.")
@click.pass_context
def diff(context: click.Context, a: Path, b: Path, weights: bool, as_json: bool) -> None:
    """Compare the states of A and B, steps or runs, per stream and parameter.

    Streams are compared by the checksums in the manifests, across world sizes, without reading them. Checkpoints of
    other frameworks are read. With a Hugging Face folder or a file of torch.save, such as an export of a run, weights
    and buffers are compared; where one side is rounded, in its dtype.
    """
    from zerokit.checkpoint import diff as differences

    try:
        comparison = differences.diff(a, b, weights=weights)
    except CheckpointError as error:
        click.echo(f"zerokit: {printable(str(error))}", err=True)
        context.exit(2)
    note(comparison.notes)
    if as_json:
        print_json({"same": comparison.same} | json_of(comparison))
    else:
        _print(differing(comparison))
    if not comparison.same:
        context.exit(1)


@click.command(
    epilog="Exit code 0: done, or nothing to do. 1: something cannot be removed, or RUN is not a run. 2: no such path."
)
@click.argument("run", type=PATH)
@click.option(
    "--keep-last", type=click.IntRange(min=1), metavar="K", help="Remove all steps except the newest K."
)
@click.option(
    "--keep-every", type=click.IntRange(min=1), metavar="M", help="Also keep steps that are multiples of M."
)
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@json_option("Print only the result, as JSON, on stdout.")
def prune(run: Path, keep_last: int | None, keep_every: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove files that killed writers left in RUN and, with --keep-last, older steps.

    The newest step, the newest step with optimizer states, the step that `latest` names and the last step before those
    that the training skipped always stay. Steps that a restarted training has superseded are removed. Files with other
    names are not touched. Unfinished saves of living processes are listed and stay; so do those of the last hour whose
    process cannot be checked from here.
    """
    from zerokit.checkpoint.prune import prune as remove

    if keep_every is not None and keep_last is None:
        raise click.UsageError("--keep-every M needs --keep-last K: without it no step is removed.")
    pruning = remove(run, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    for doomed in pruning.removed:
        if not as_json:
            why = f"; {doomed.leftover.describe()}" if doomed.leftover else ""
            verb = "would remove" if dry_run else "removed"
            say(f"{verb} {doomed.path}: {decimal_size(doomed.size)}{why}")
    if as_json:
        left = [{"path": str(path), "reason": reason} for path, reason in pruning.left]
        removed = [
            {"path": str(one.path), "kind": "leftover" if one.leftover else "step", "bytes": one.size}
            for one in pruning.removed
        ]
        plain = {"run": str(run), "dry_run": dry_run, "bytes": pruning.bytes}
        print_json(plain | {"removed": removed, "left": left})
        return
    for path, reason in pruning.left:
        say(f"left {path}: {reason}")
    verb = "would be freed" if dry_run else "freed"
    say(f"{run}: {decimal_size(pruning.bytes)} {verb}")
