"""`inspect`: what a checkpoint holds, by its manifest and the headers of its small files."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from zerokit.checkpoint.reader import Checkpoint


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
    """A tensor that is stored whole, in `common`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileSummary:
    """A file's size in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a checkpoint holds. `trainable_numel` and `frozen_numel` count elements, tied ones once.

    `weights_only`: parameters and buffers, without an optimizer's state.
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

    def plain(self) -> dict[str, object]:
        """As JSON data."""
        return asdict(self) | {"path": str(self.path)}


def inspect(path: str | os.PathLike[str]) -> Summary:
    """Describe the checkpoint at `path`, a step's directory or a run's, whose `latest` is followed.

    No stream is read or proven: `verify` does that. Raises `CheckpointError` where the manifest or `common` is damaged.
    """
    checkpoint = Checkpoint(path)
    manifest, layout = checkpoint.manifest, checkpoint.layout
    line = list(layout.parameters)
    kinds: list[list[str]] = [[] for _ in line]
    streams = []
    for stream in manifest.streams:
        for place in stream.parameters:
            kinds[place].append(stream.kind)
        numel = sum(line[place].numel for place in stream.parameters)
        streams.append(
            StreamSummary(
                stream.kind, stream.dtype, len(stream.parameters), numel, numel * stream.element_bytes
            )
        )
    files = [FileSummary(file.name, file.size) for file in (*manifest.files, manifest.common, manifest.extra)]
    return Summary(
        checkpoint.path,
        manifest.step,
        manifest.world,
        manifest.weights_only,
        len(layout.units),
        layout.trainable_numel,
        sum(parameter.numel for parameter in line if not parameter.trainable),
        sum(file.bytes for file in files),
        tuple(streams),
        tuple(
            ParameterSummary(p.name, p.shape, p.dtype, p.trainable, p.group, p.aliases, tuple(held))
            for p, held in zip(line, kinds, strict=True)
        ),
        tuple(TensorSummary(t.name, t.dtype, t.shape) for t in checkpoint.common.tensors.values()),
        tuple(files),
    )
