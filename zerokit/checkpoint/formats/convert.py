"""`convert`, `reshard` and `consolidate`: a checkpoint in another format, or for another number of ranks.

zerokit's own is cut by copying byte ranges, the common refinement of the old cuts and the new ones, undecoded. Their
checksums combine to those of the old slices, which verifies what was read, and to those of the new ones, which
the new manifest states; no byte is read twice for it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from zerokit.checkpoint.by_rank import shown
from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.copying import Options, Progress, converting
from zerokit.checkpoint.disk import make_directory, sync_directory, write_exactly, write_file
from zerokit.checkpoint.formats import FORMATS, WEIGHTS_ALONE
from zerokit.checkpoint.formats.dcp_writer import write_dcp
from zerokit.checkpoint.formats.deepspeed_writer import write_deepspeed
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.formats.huggingface_writer import DEFAULT_SHARD_SIZE, write_weights
from zerokit.checkpoint.latest import LATEST_NAME, Latest
from zerokit.checkpoint.manifest import COMMON_NAME, EXTRA_NAME, MAX_WORLD, NAME, File, own_checksum
from zerokit.checkpoint.nodes.given import Paths, alone
from zerokit.checkpoint.opening import opened_source
from zerokit.checkpoint.prune import foreign_to_checkpoint
from zerokit.checkpoint.requests import Request, requests_for
from zerokit.checkpoint.run import step_name
from zerokit.checkpoint.safetensors import rank_file
from zerokit.checkpoint.source import Source
from zerokit.errors import UsageError, ZerokitWarning
from zerokit.files import path_of
from zerokit.layout import Layout


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion: the directory `output` in `format`, for `world` ranks (1 for weights alone).

    `path` is the step's directory in it where that is a run. `dtypes` are those of the floating-point weights in a
    Hugging Face folder, and empty for other formats.
    """

    output: Path
    path: Path
    format: str
    step: int
    source_format: str
    source_world: int
    world: int
    dtypes: tuple[str, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether the source has checksums, by which all bytes were verified."""
        return self.source_format != "huggingface"


def convert(
    source: Paths,
    output: str | os.PathLike[str] | None = None,
    *,
    format: str | None = None,
    world: int | None = None,
    shares: Sequence[int] = (),
    dtype: str | None = None,
    stream: str = "master",
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    like: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write the checkpoint `source`, of any format, in another one or for another number of ranks.

    Bytes are copied, and verified by the source's checksums where it has them; nothing of the framework that wrote it
    is needed, and none of its pickles is executed. The output is synced to the disk and appears whole or not at all.

    Args:
        source: a directory of zerokit, DeepSpeed (stages 1 to 3), DCP (FSDP2) or Hugging Face, or a file of
            `torch.save` with a state dict, of which the weights are read. Or several directories of nodes, which have a
            step of zerokit's together: paths, or `host:path` for what is fetched with ssh.
        output: a directory that does not exist yet; by default beside the source, such as `run.to-16`.
        format: "zerokit", "deepspeed" (from DeepSpeed only), "dcp" or "huggingface" (weights alone); by default the
            source's own, or zerokit's for a Hugging Face folder or a file.
        world: number of ranks that the output is cut for; by default the source's.
        shares: of "zerokit": how much each rank gets, one integer a rank, in the order of the ranks' files; by default
            all the same.
        dtype, stream, max_shard_size, like: of "huggingface"; see `consolidate`.
        jobs: threads that copy; up to four by default.
        force: replace an existing output of zerokit's; a run only if it holds no more than one step.
        progress: called with the bytes copied and the bytes in all, often; what it raises ends the work.

    Returns what was written. Raises `UsageError` for impossible arguments, and `CheckpointError` if the source is
    damaged or of an unsupported kind, or the output cannot be written; there is no output then, or it is as before.
    """
    if output is None and alone(source) is None:
        raise UsageError(
            "several directories, or one of another machine, have no place beside them: name the output (-o)"
        )
    beside, options = None if output is None else path_of(output), Options(jobs, force, progress)
    with opened_source(source, beside=beside, progress=progress) as checkpoint:
        return _convert(
            checkpoint, beside, format, world, shares, dtype, stream, max_shard_size, like, options
        )


def _convert(
    checkpoint: Source,
    output: Path | None,
    format: str | None,
    world: int | None,
    shares: Sequence[int],
    dtype: str | None,
    stream: str,
    max_shard_size: int | str,
    like: str | os.PathLike[str] | None,
    options: Options,
) -> Converted:
    kind = format or ("zerokit" if checkpoint.format in WEIGHTS_ALONE else checkpoint.format)
    if kind not in FORMATS:
        raise UsageError(f"format={kind!r}: expected one of {', '.join(FORMATS)}")
    ranks = checkpoint.world if world is None else world
    if type(ranks) is not int or not 1 <= ranks <= MAX_WORLD:
        raise UsageError(f"world={ranks!r}: expected an integer from 1 to {MAX_WORLD}")
    if shares and kind != "zerokit":
        raise UsageError(f"shares are for the format zerokit, not {kind}, whose ranks all have the same")
    if kind != "huggingface" and (dtype is not None or like is not None or stream != "master"):
        raise UsageError(f"dtype, stream and like are for the format huggingface, not {kind}")
    path = (checkpoint.run or checkpoint.path).resolve()
    suffix = ranks if format in (None, checkpoint.format) else kind
    target = path.with_name(f"{path.name}.to-{suffix}") if output is None else output
    checkpoint.warn()
    written, dtypes = target, tuple[str, ...]()
    if kind == "huggingface":
        if world is not None:
            raise UsageError("a Hugging Face folder is not sharded: omit world (--to)")
        ranks = 1
        dtypes = write_weights(checkpoint, target, options, dtype, stream, max_shard_size, like)
    elif kind == "zerokit":
        _note_ranks(checkpoint, ranks)
        written = write_cut(checkpoint, _cut(checkpoint, ranks, shares, kept=world is None), target, options)
    elif kind == "dcp":
        write_dcp(checkpoint, ranks, target, options)
    elif isinstance(checkpoint, ForeignCheckpoint) and checkpoint.format == "deepspeed":
        write_deepspeed(checkpoint, ranks, target, options)
    else:
        raise UsageError(
            f"{checkpoint.path} has format {checkpoint.format}: a DeepSpeed checkpoint is only written from one of "
            "DeepSpeed, whose own settings it keeps; choose the format zerokit or dcp"
        )
    source_form = checkpoint.format, checkpoint.world
    return Converted(target, written, kind, checkpoint.step, *source_form, ranks, dtypes)


def reshard(
    source: Paths,
    world: int,
    output: str | os.PathLike[str] | None = None,
    *,
    shares: Sequence[int] = (),
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the checkpoint `source` as `world` ranks, of these `shares`, would have saved it, byte for byte.

    A checkpoint of DeepSpeed or DCP (FSDP2) keeps its format. A step becomes a step; a run becomes a run of one step,
    with its `latest`. `load` needs none of this: it reads checkpoints of any world size.

    Args:
        source: the directory of a step, or of a run, whose newest step is taken; or several, see `convert`.
        world: number of ranks, at least 1.
        output, shares, jobs, force, progress: see `convert`.

    Returns the step's directory: the output, or in it. Raises as `convert` does.
    """
    done = convert(source, output, world=world, shares=shares, jobs=jobs, force=force, progress=progress)
    return done.path


def consolidate(
    source: Paths,
    output: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    stream: str = "master",
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    like: str | os.PathLike[str] | None = None,
    force: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the weights and buffers of `source` as `model.safetensors`, or as several with an index.

    Only the first name of tied parameters is written, as `save_pretrained` does: loaders tie them again.

    Args:
        source: the directory of a step, or of a run, whose newest step is taken; or several, see `convert`.
        output: a directory that does not exist yet.
        dtype: "bf16", "fp16" or "fp32" for everything that is floating-point; by default each parameter's own dtype in
            the model that was saved, and the buffers' own.
        stream: what is taken as the trainable parameters: "master", or "ema" for the average that `zerokit.Ema` kept.
        max_shard_size: largest size of the tensors in one file, in bytes or such as "5GB" (10^9) or "5GiB" (2^30);
            a single tensor that is larger has a file of its own.
        like: a folder that `from_pretrained` takes, such as the one that the training began with: its configuration,
            tokenizer and similar files are copied, so that `from_pretrained(output)` works.
        force, jobs, progress: see `convert`.

    Returns the output. Raises as `convert` does, `UsageError` for an unknown dtype or size or a stream that is not
    there, and `CheckpointError` if `like` has no configuration or a value does not fit the dtype.
    """
    return convert(
        source,
        output,
        format="huggingface",
        dtype=dtype,
        stream=stream,
        max_shard_size=max_shard_size,
        like=like,
        jobs=jobs,
        force=force,
        progress=progress,
    ).output


def _note_ranks(source: Source, world: int) -> None:
    """Warn of what only as many ranks as saved it can load."""
    ranks = source.manifest.extra_ranks
    if ranks not in (0, world):
        names = ", ".join(map(shown, source.by_rank))
        warnings.warn(
            f"{source.path}: {names} is carried over as {ranks} ranks gave it, each its "
            f"own: load() on {world} refuses it, or leaves it out with strict=False",
            ZerokitWarning,
            stacklevel=3,
        )


def _cut(source: Source, world: int, shares: Sequence[int], *, kept: bool) -> Layout:
    """The source's layout for so many ranks; without `shares` as it is, if that is to be `kept`."""
    if kept and not shares:
        return source.layout
    try:
        return source.layout.for_world(world, shares)
    except ValueError as error:
        raise UsageError(f"shares={shares!r}: {error}") from None


def write_cut(source: Source, layout: Layout, target: Path, options: Options) -> Path:
    """Write any source in zerokit's format, cut as `layout` is: a step, or a run of one step.

    Returns the step's directory. Raises as `convert` does.
    """
    with converting(source, target, options, foreign_to_checkpoint) as work:
        if source.run is None:
            _write(source, layout, work, options)
            return target
        name = step_name(source.step)
        make_directory(work / name)
        crc = own_checksum(_write(source, layout, work / name, options))
        assert crc is not None
        sync_directory(work / name)
        write_file(work / LATEST_NAME, Latest(name, (crc,)).text().encode())
    return target / name


def _write(source: Source, layout: Layout, step: Path, options: Options) -> bytes:
    """Everything of a step, in the directory `step`; returns its manifest."""
    manifest = source.manifest
    if manifest.frozen:  # beside the source: the output has all of it
        manifest = replace(manifest, frozen=None)
    source.check_files()
    described, wholes = [], {}
    with options.copying(source) as copier:
        for rank in range(layout.world):
            file = rank_file(layout, manifest.in_files, manifest.step, rank)
            described.append(File(file.name, file.size, len(file.header), crc32(file.header)))
            target = copier.target(step / file.name, file.size)
            write_exactly(target.fd, [file.header], 0, target.path)
            requests = (
                requests_for(source, extent.stream, extent.position, extent.interval, target, extent.offset)
                for extent in file.extents
            )
            copier.copy(source, chain.from_iterable(requests))
            copier.release(target)
        for whole, content in source.whole_files():
            wholes[whole.name] = whole  # states that are not cut are as the manifest has them
            if content is not None:
                write_file(step / whole.name, content)
                continue
            target = copier.target(step / whole.name, whole.size)
            copier.copy(source, [Request(whole.name, source.place(whole.name), 0, whole.size, target, 0)])
            copier.release(target)
    cut = manifest.written(layout, tuple(described), copier.pieces)
    content = replace(cut, common=wholes[COMMON_NAME], extra=wholes[EXTRA_NAME]).to_bytes()
    write_file(step / NAME, content)
    return content
