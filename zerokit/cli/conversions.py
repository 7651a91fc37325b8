"""`zerokit reshard`, `convert`, `consolidate` and `gather`: commands that write a new checkpoint."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zerokit.cli.work import (
    EXISTING,
    PATH,
    checkpoint_argument,
    json_option,
    note,
    options,
    print_json,
    say,
)
from zerokit.terminal.working import working
from zerokit.text import counted, decimal_size, printable

if TYPE_CHECKING:
    from zerokit.checkpoint.formats.convert import Converted

F = TypeVar("F", bound=Callable[..., Any])
_EPILOG = (
    "The output is synced to disk and appears whole or not at all. Exit code 0: written. 1: not written. "
    "2: wrong usage, or no such path."
)
_how = (
    click.option("--jobs", type=click.IntRange(min=1), help="Number of copying threads.  [default: up to 4]"),
    click.option("--force", is_flag=True, help="Replace an existing output."),
    json_option("Print the result on stdout as JSON."),
)
_writing = options(
    click.option(
        *("-o", "--output"),
        type=PATH,
        help="A new directory.  [default: beside CKPT, named after it, such as run.to-16 or run.to-huggingface]",
    ),
    *_how,
)


class Integers(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """Integers with commas between them."""

    name = "integers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse them."""
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"\d{1,7}(,\d{1,7})*", str(value), re.ASCII):
            self.fail(f"{value!r}: expected integers with commas between them, such as 3,3,1,1.", param, ctx)
        return tuple(map(int, str(value).split(",")))


def _weights(prefix: str) -> Callable[[F], F]:
    """The options of weights for Hugging Face: dtype, max_shard_size and like; `prefix` begins their help."""
    return options(
        click.option(
            "--dtype",
            type=click.Choice(["bf16", "fp16", "fp32"]),
            help=f"{prefix}Dtype of all floating-point tensors.  [default: each tensor's own in the model]",
        ),
        click.option(
            "--max-shard-size",
            default="5GB",
            show_default=True,
            help=f"{prefix}Maximum size of a file, such as 300MB, 5GB (10^9) or 5GiB (2^30).",
        ),
        click.option(
            "--like",
            type=EXISTING,
            metavar="MODEL_DIR",
            help=f"{prefix}Copy configuration and tokenizer from this folder.",
        ),
    )


def _converted(task: str, checkpoint: tuple[Path, ...], output: Path | None, **how: Any) -> Converted:
    from zerokit.checkpoint.formats.convert import convert

    with working(task) as progress:
        return convert(checkpoint, output, progress=progress, **how)


def _tell(
    output: Path,
    as_json: bool,
    about: Mapping[str, object],
    written: str,
    *,
    verified: bool = True,
    reminder: str = "",
) -> None:
    """Print the path on stdout, or in JSON what is known `about` it and its files; and on stderr what was `written`."""
    paths = sorted(path for path in output.rglob("*") if path.is_file())
    files = {str(path.relative_to(output)): path.stat().st_size for path in paths}
    if as_json:
        print_json({"output": str(output), **about, "files": files})
    else:  # unchanged for a program, escaped for a terminal
        click.echo(printable(str(output)) if sys.stdout.isatty() else output)
    size = f"{counted(len(files), 'file')}, {decimal_size(sum(files.values()))}"
    checked = "verified and synced" if verified else "synced (its source has no checksums)"
    say(f"{output}: {written}, {size}, {checked}{reminder}", err=True)


@click.command(epilog=_EPILOG)
@checkpoint_argument
@click.option("--to", "world", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option(
    "--shares",
    type=Integers(),
    default=(),
    metavar="N,N,…",
    help="How much each rank gets, such as 3,3,1,1, in the order of the ranks' files.  [default: all the same]",
)
@_writing
def reshard(checkpoint: tuple[Path, ...], world: int, output: Path | None, as_json: bool, **how: Any) -> None:
    """Cut CKPT, a step or a run's newest, for another number of ranks.

    Several CKPT are nodes' own directories, as paths or as host:path (fetched with ssh).

    Writes, byte for byte, what that many ranks would have saved. Every byte copied is verified by its checksum. A
    checkpoint of DeepSpeed or DCP (FSDP2) keeps its format: convert writes another one. zerokit.load and bench
    --resume do not need this: they take a checkpoint of any number of ranks.
    """
    done = _converted("resharding", checkpoint, output, world=world, **how)
    reminder = (
        "; zerokit.load and bench --resume read any number of ranks without resharding"
        if done.format == "zerokit"
        else f"; in the source's format ({done.format}): zerokit convert writes another one"
    )
    about = {"world": world, "step": str(done.path)}
    written = f"step {done.step} of {counted(done.source_world, 'rank')} cut for {world:,}"
    _tell(done.output, as_json, about, written, verified=done.verified, reminder=reminder)


@click.command(epilog=_EPILOG)
@checkpoint_argument
@click.option(
    "--format",
    type=click.Choice(["zerokit", "huggingface", "dcp", "deepspeed"]),
    default="zerokit",
    show_default=True,
    help="Output format. deepspeed needs a DeepSpeed source; huggingface has only the weights.",
)
@click.option("--to", "world", type=click.IntRange(min=1), help="Number of ranks.  [default: as CKPT]")
@_weights("huggingface: ")
@_writing
def convert(checkpoint: tuple[Path, ...], output: Path | None, as_json: bool, **how: Any) -> None:
    """Write CKPT in another format, or in the same format for another number of ranks.

    After one CKPT the output may also stand without -o.

    CKPT is a checkpoint of zerokit, of DeepSpeed at stage 1, 2 or 3, of PyTorch's DCP as FSDP2, accelerate and
    torchtitan write it, a Hugging Face folder, or a file of torch.save with a state_dict, of which weights are read.
    Several CKPT are nodes' own directories, as paths or as host:path (fetched with ssh).
    Masters, moments, step counts, frozen parameters and buffers are copied and verified; no framework is imported and
    no pickle is executed.
    """
    if output is None and len(checkpoint) > 1:
        *checkpoints, output = checkpoint
        if len(checkpoints) > 1:
            raise click.UsageError("several directories have one output: name it with -o.")
        checkpoint = tuple(checkpoints)
    done = _converted("converting", checkpoint, output, **how)
    ranks = f", {counted(done.world, 'rank')}" if done.format != "huggingface" else ""
    written = f"step {done.step} of {done.source_format} as {done.format}{ranks}"
    about = {
        "format": done.format,
        "world": done.world,
        "step": str(done.path),
        "source": {"format": done.source_format, "world": done.source_world},
    }
    _tell(done.output, as_json, about, written, verified=done.verified)


@click.command(epilog=_EPILOG)
@checkpoint_argument
@_weights("")
@click.option(
    "--stream",
    default="master",
    show_default=True,
    help="Source of the weights: master, or ema for the average kept by zerokit.Ema.",
)
@_writing
def consolidate(checkpoint: tuple[Path, ...], output: Path | None, as_json: bool, **how: Any) -> None:
    """Write the weights of CKPT, a step or a run's newest, for Hugging Face's loaders.

    Several CKPT are nodes' own directories, as paths or as host:path (fetched with ssh).

    The result is model.safetensors, or several such files with an index. Only the first of tied weights is written.
    With --like, the folder is one that from_pretrained takes.
    """
    done = _converted("consolidating", checkpoint, output, format="huggingface", **how)
    written = f"weights of step {done.step} in {', '.join(done.dtypes)}"
    about = {"step": done.step, "dtypes": list(done.dtypes), "source": {"format": done.source_format}}
    _tell(done.output, as_json, about, written, verified=done.verified)


@click.command(epilog=_EPILOG)
@click.argument("nodes", metavar="NODE...", type=PATH, nargs=-1, required=True)
@click.option("-o", "--output", type=PATH, required=True, help="A new directory: the run.")
@options(*_how)
def gather(nodes: tuple[Path, ...], output: Path, as_json: bool, **how: Any) -> None:
    """Make one ordinary run of the directories of nodes that saved without a shared one.

    NODE is a node's run, as a path or as host:path (fetched with ssh). The newest step that they have together is
    written, byte for byte as a save into a shared directory would have. Nodes may be missing as long as others have
    their copies. What is damaged in one directory is taken from another that has it.
    """
    from zerokit.checkpoint.nodes.gather import gather as collect

    with working("gathering") as progress:
        done = collect(nodes, output, progress=progress, **how)
    note(done.notes)
    note(done.mended)
    about = {
        "step": str(done.path),
        "world": done.world,
        "mended": list(done.mended),
        "notes": list(done.notes),
    }
    _tell(done.output, as_json, about, f"step {done.step} of {counted(done.world, 'rank')}")
