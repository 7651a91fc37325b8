"""`convert`: a checkpoint in another format, or the same one for another number of ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zerokit import __version__
from zerokit.checkpoint.consolidate import DEFAULT_SHARD_SIZE, write_weights
from zerokit.checkpoint.conversion import converting
from zerokit.checkpoint.copying import Progress
from zerokit.checkpoint.formats import FORMATS, dcp_writer, deepspeed_writer, open_source
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.journal import Request
from zerokit.checkpoint.manifest import MAX_WORLD
from zerokit.checkpoint.recognise import foreign_to_dcp, foreign_to_deepspeed
from zerokit.checkpoint.reshard import write_cut
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.staging import require_apart
from zerokit.errors import UsageError


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written: the directory `output` in `format`, for `world` ranks (1 for weights alone).

    `path` is the step's directory in it where that is a run. `taken_bytes` had been finished by an interrupted
    conversion.
    """

    output: Path
    path: Path
    format: str
    step: int
    source_format: str
    source_world: int
    world: int
    taken_bytes: int = 0


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    format: str | None = None,
    world: int | None = None,
    dtype: str | None = None,
    stream: str = "master",
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    like: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    force: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write the checkpoint `source`, of any format, in another one or for another number of ranks.

    Bytes are copied, and verified by the source's checksums where it has them; nothing of the framework that wrote it
    is needed, and none of its pickles is executed. The output is synced to the disk and appears whole or not at all.

    Args:
        source: a directory of zerokit, DeepSpeed (stages 1 to 3), DCP (FSDP2) or Hugging Face.
        output: a directory that does not exist yet; by default beside the source, such as `run.to-16`.
        format: "zerokit", "deepspeed" (from DeepSpeed only), "dcp" or "huggingface" (weights alone); by default the
            source's own, or zerokit's for a Hugging Face folder.
        world: number of ranks that the output is cut for; by default the source's.
        dtype, stream, max_shard_size, like: of "huggingface"; see `consolidate`.
        jobs: threads that copy; up to four by default.
        force: replace an existing output.
        resume: take over the files that a killed one of the same arguments has finished.
        progress: called with the bytes copied and the bytes in all, often; what it raises ends the work.

    Returns what was written. Raises `UsageError` for impossible arguments, and `CheckpointError` if the source is
    damaged or of an unsupported kind, or the output cannot be written; there is no output then, or it is as before.
    """
    return convert_source(
        open_source(source),
        output,
        format=format,
        world=world,
        dtype=dtype,
        stream=stream,
        max_shard_size=max_shard_size,
        like=like,
        jobs=jobs,
        force=force,
        resume=resume,
        progress=progress,
    )


def convert_source(
    checkpoint: Source,
    output: str | os.PathLike[str] | None,
    *,
    format: str | None = None,
    world: int | None = None,
    dtype: str | None = None,
    stream: str = "master",
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    like: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    force: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """`convert` of a checkpoint that is open."""
    kind = format or (checkpoint.format if checkpoint.format != "huggingface" else "zerokit")
    if kind not in FORMATS:
        raise UsageError(f"format={kind!r}: expected one of {', '.join(FORMATS)}")
    ranks = checkpoint.world if world is None else world
    if not 1 <= ranks <= MAX_WORLD:
        raise UsageError(f"world={ranks!r}: expected an integer from 1 to {MAX_WORLD}")
    if kind != "huggingface" and (dtype is not None or like is not None or stream != "master"):
        raise UsageError(f"dtype, stream and like are for format='huggingface', not {kind!r}")
    path = (checkpoint.run or checkpoint.path).resolve()
    suffix = ranks if kind == checkpoint.format else kind
    target = path.with_name(f"{path.name}.to-{suffix}") if output is None else Path(output)
    if kind == "huggingface":
        if world is not None:
            raise UsageError("a Hugging Face folder is not cut for ranks: leave world out")
        write_weights(
            checkpoint,
            target,
            dtype=dtype,
            stream=stream,
            max_shard_size=max_shard_size,
            like=like,
            force=force,
            resume=resume,
            jobs=jobs,
            progress=progress,
        )
        return _converted(checkpoint, target, target, kind, 1)
    if kind == "zerokit":
        cut = write_cut(checkpoint, ranks, target, jobs=jobs, force=force, resume=resume, progress=progress)
        return _converted(checkpoint, target, cut.path, kind, ranks, cut.taken_bytes)
    checkpoint.warn()
    require_apart(checkpoint.path, target)
    if kind == "deepspeed":
        if not isinstance(checkpoint, ForeignCheckpoint) or checkpoint.format != "deepspeed":
            raise UsageError(
                f"{checkpoint.path} is of {checkpoint.format}: a DeepSpeed checkpoint is only written from one of "
                "DeepSpeed, whose own settings it keeps; use format='zerokit' or 'dcp'"
            )
        foreign = foreign_to_deepspeed
        write = partial(deepspeed_writer.write_deepspeed, checkpoint)
    else:
        foreign = foreign_to_dcp
        write = partial(dcp_writer.write_dcp, checkpoint)
    request = Request(
        target.name,
        checkpoint.manifest_crc,
        {"command": "convert", "zerokit": __version__, "format": kind, "world": ranks},
    )
    with converting(target, request, resume=resume, force=force, foreign=foreign) as work:
        write(ranks, work, jobs=jobs, progress=progress)
        taken = work.taken_bytes
    return _converted(checkpoint, target, target, kind, ranks, taken)


def _converted(source: Source, output: Path, path: Path, kind: str, world: int, taken: int = 0) -> Converted:
    return Converted(output, path, kind, source.step, source.format, source.world, world, taken)
