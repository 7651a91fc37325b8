"""`inspect`: the contents of a checkpoint, from its manifest and small files' headers, and of its run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from zerokit import files
from zerokit.checkpoint.bases import bases_of
from zerokit.checkpoint.copying import Progress
from zerokit.checkpoint.disk import explained, is_there
from zerokit.checkpoint.formats import of_newest
from zerokit.checkpoint.nodes.complete import Holding
from zerokit.checkpoint.nodes.given import Paths, alone, given_directories
from zerokit.checkpoint.nodes.held import missing_here, own_lacks
from zerokit.checkpoint.nodes.joined import Joined, Look, join
from zerokit.checkpoint.nodes.scan import has_nodes
from zerokit.checkpoint.run import committed, read_sound, superseded
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.staging import Leftover, leftovers
from zerokit.errors import CheckpointError, StorageError
from zerokit.layout import Interval


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """A stream: `numel` elements of `parameters` parameters in all."""

    kind: str
    dtype: str
    parameters: int
    numel: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ParameterSummary:
    """A parameter: `dtype` is the model's; `streams` its kinds of state."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    group: int
    aliases: tuple[str, ...]
    streams: tuple[str, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A whole tensor in `common`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileSummary:
    """A file and its size in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class StepSummary:
    """A step of a run, its size in bytes. `weights_only` is None if the step is `damaged`.

    `superseded`: another training has begun before it, so that `load` passes over it. `skipped_steps`: how many the
    training had left out. `incomplete`: in a node's own directory, which files are missing, and which nodes have them.
    """

    name: str
    bytes: int
    weights_only: bool | None
    superseded: bool
    damaged: str
    skipped_steps: int = 0
    incomplete: str = ""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run: its committed steps, ascending, unfinished saves, and directories of frozen parameters."""

    path: Path
    steps: tuple[StepSummary, ...]
    leftovers: tuple[Leftover, ...]
    frozen: tuple[FileSummary, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """What a directory has of a step that nodes have together, by its node's record.

    `node` is its number of `nodes`, or None where it has no record that can be read. `ranks` were on that node, and
    `copies` are other ranks whose files it should have. `lacks`: files that should be there, and are not.
    """

    path: str
    node: int | None
    nodes: int
    ranks: tuple[int, ...]
    copies: tuple[int, ...]
    lacks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """The contents of a checkpoint. `trainable_numel` and `frozen_numel` count elements, tied ones once.

    `weights_only`: parameters and buffers, without an optimizer's state. `run`: the one whose newest step this is;
    None where a step was named. `notes`: why it is not the step that `latest` names. `by_rank`: members of `extra`
    that `extra_ranks` ranks gave each for itself, "" for all of it. `skipped_steps`: how many the training had left
    out until this save, and `skipped_in_a_row` how many of them came right before it.

    `frozen`: None where frozen parameters are in `files`; else the directory beside the step that has them, or "" where
    the checkpoint has none of them.

    `nodes`: of a step in nodes' own directories, what each of them has. `missing`: which files none of them has, and
    which nodes do; `files` and `bytes` are of those that are there.
    """

    path: Path
    step: int
    world: int
    weights_only: bool
    units: int
    trainable_numel: int
    frozen_numel: int
    bytes: int
    streams: tuple[StreamSummary, ...]
    parameters: tuple[ParameterSummary, ...]
    common: tuple[TensorSummary, ...]
    files: tuple[FileSummary, ...]
    run: RunSummary | None = None
    notes: tuple[str, ...] = ()
    format: str = "zerokit"
    extra_ranks: int = 0
    by_rank: tuple[str, ...] = ()
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    frozen: str | None = None
    nodes: tuple[NodeSummary, ...] = ()
    missing: str = ""


def inspect(path: Paths, progress: Progress | None = None) -> Summary:
    """Describe the checkpoint at `path`: a step, or a run's newest step; or in several directories of nodes.

    Of directories on other machines (`host:path`) small files are fetched with ssh; `progress` is called meanwhile.

    No stream is read or verified: `verify` does that; a step counts as damaged by its manifest, or by files that are
    missing or too short. Raises `CheckpointError` where the manifest or `common` is damaged.
    """
    if (one := alone(path)) is not None and not has_nodes(one):
        return of_newest(_summary, one)
    with given_directories(path, report=progress) as directories:
        look = Look(directories)
        newest = look.newest
        joined = join(directories) if newest is None else look.joined(newest)
        with joined.reading():
            joined.settle((joined.manifest.common.name, joined.manifest.extra.name), progress)
            return replace(
                _summary(joined, lists_run=one is not None),
                path=Path(joined.shown),
                nodes=tuple(_node(holding, joined) for holding in joined.holdings),
                missing=joined.missing,
            )


def _node(holding: Holding, joined: Joined) -> NodeSummary:
    path, record = joined.named(holding.place), holding.record
    if record is None:
        return NodeSummary(path, None, 0, (), (), holding.lacks)
    own = record.wrote[record.node]
    copies = tuple(rank for rank in record.holds[record.node] if rank not in own)
    return NodeSummary(path, record.node, len(record.wrote), own, copies, own_lacks(holding, joined.manifest))


def _summary(checkpoint: Source, *, lists_run: bool = True) -> Summary:
    manifest, layout = checkpoint.manifest, checkpoint.layout
    line = list(layout.parameters)
    kinds: list[list[str]] = [[] for _ in line]
    streams = []
    for stream in manifest.streams:
        for position in stream.parameters:
            kinds[position].append(stream.kind)
        numel = sum(stream.elements(Interval(0, line[p].numel)).numel for p in stream.parameters)
        streams.append(
            StreamSummary(
                stream.kind, stream.dtype, len(stream.parameters), numel, numel * stream.element_bytes
            )
        )
    for one in manifest.uncut:
        kinds[one.position] += [kind for kind in one.kinds if kind not in kinds[one.position]]
    held = [FileSummary(name, size) for name, size in checkpoint.held_files()]
    return Summary(
        checkpoint.path,
        manifest.step,
        manifest.world,
        manifest.weights_only,
        len(layout.units),
        layout.trainable_numel,
        sum(parameter.numel for parameter in line if not parameter.trainable),
        sum(file.bytes for file in held),
        tuple(streams),
        tuple(
            ParameterSummary(p.name, p.shape, p.dtype, p.trainable, p.group, p.aliases, tuple(own))
            for p, own in zip(line, kinds, strict=True)
        ),
        tuple(TensorSummary(name, *form) for name, form in checkpoint.common_forms.items()),
        tuple(held),
        _run(checkpoint.run) if checkpoint.run and lists_run and checkpoint.format == "zerokit" else None,
        checkpoint.notes,
        checkpoint.format,
        manifest.extra_ranks,
        tuple(name or "" for name in checkpoint.by_rank),
        manifest.skips.total,
        manifest.skips.in_a_row,
        manifest.frozen,
    )


def _run(run: Path) -> RunSummary:
    steps = []
    for path in committed(run):
        weights_only, damaged, skipped, incomplete = None, "", 0, ""
        try:
            manifest, crc = read_sound(path, part=True)
            weights_only, skipped = manifest.weights_only, manifest.skips.total
            incomplete = missing_here(path, manifest, crc)
        except CheckpointError as error:
            if not is_there(path):
                continue  # a save beside this has removed it
            if isinstance(error, StorageError):
                raise
            damaged = str(error)
        with explained(path, "looked at"):
            size, _ = files.measured(path)
        said = superseded(path), damaged, skipped, incomplete
        steps.append(StepSummary(path.name, size, weights_only, *said))
    shared = tuple(FileSummary(base.name, files.measured(base)[0]) for base in bases_of(run))
    return RunSummary(run, tuple(steps), tuple(leftovers(run)), shared)
