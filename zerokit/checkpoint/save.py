"""`save`: every rank writes its own pieces, rank 0 the rest, and one rename commits them all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.checkpoint import rng
from zerokit.checkpoint.checksum import Piece, combine, crc32
from zerokit.checkpoint.disk import new_file, staged, write_exactly, write_file, write_latest
from zerokit.checkpoint.extents import (
    ELEMENT_BYTES,
    SAFETENSORS_NAMES,
    Stream,
    encode_header,
    file_name,
    names_of,
    rank_file,
)
from zerokit.checkpoint.extra import encode
from zerokit.checkpoint.manifest import (
    COMMON_NAME,
    EXTRA_NAME,
    NAME,
    WEIGHT_KINDS,
    File,
    Manifest,
    Scalars,
    own_checksum,
)
from zerokit.checkpoint.run import newest_manifest, remove_leftovers, require_run, step_name
from zerokit.checkpoint.state import describe, dtype_name, host_bytes, merge, own_slices
from zerokit.checkpoint.together import Together
from zerokit.errors import CheckpointError, UsageError
from zerokit.layout import Layout
from zerokit.runtime import ZeroOptimizer


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is stored once, whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Written:
    """A rank's file: the CRC-32 of its header and of each of its extents."""

    size: int
    header_size: int
    header_crc: int
    crcs: list[int]


@dataclass(frozen=True, slots=True)
class Contents:
    """What the manifest tells of the ranks' files."""

    step: int
    layout: Layout
    streams: tuple[Stream, ...]
    scalars: tuple[Scalars, ...]
    written: list[Written]
    weights_only: bool


@dataclass(slots=True)
class Rest:
    """What is not cut: members of `extra.json`, plain or to be encoded, and tensors of `common`."""

    plain: dict[str, Any]
    encoded: dict[str, Any]
    tensors: list[Whole]


def save(
    run_directory: str | os.PathLike[str],
    optimizer: ZeroOptimizer,
    *,
    step: int,
    extra: Any = None,
    overwrite: bool = False,
    weights_only: bool = False,
) -> Path:
    """Write the whole training state as `run_directory/step-########`, and point `latest` at it. Collective.

    Masters, every optimizer state, frozen parameters, persistent buffers, parameter groups' options, the loss scale and
    random number generators are written; gradients are not, so call it between steps.

    Args:
        run_directory: made if it does not exist; it must be shared by all nodes.
        optimizer: its model comes with it.
        step: names the checkpoint.
        extra: JSON-like data, tensors included, such as schedulers' `state_dict()`s and the sampler's position.
            Rank 0's is written, and `load` returns it.
        overwrite: replace this step where it is there already, at once and only when the new one is complete and on
            the disk; both take space until then. By default that is refused: `check_run` tells before training.
        weights_only: write parameters and buffers, and no optimizer's state: trained parameters as their masters, so
            that nothing is rounded (`consolidate` converts), frozen ones and buffers as they are. `latest` leads to
            them, too: beside whole checkpoints, give them a run directory of their own.

    Returns the step's directory. Raises `CheckpointError` on every rank if any of them fails; then there is what was
    there before.
    """
    if type(step) is not int or step < 0:
        raise UsageError(f"step={step!r}: expected an integer of at least 0")
    parts = optimizer.parts
    if optimizer.refusal:
        raise CheckpointError(f"this state cannot be saved: {optimizer.refusal}")
    parts.control.finish()
    parts.walk.absorb_changes()  # weights that were clamped, say, since the last step: masters are what is written
    together = Together(parts.collectives)
    rank, layout = together.rank, parts.layout
    target = Path(run_directory) / step_name(step)
    states = {} if weights_only else rng.capture(parts.collectives.device)
    found = together.do(lambda: (describe(parts, rank, weights_only=weights_only), states))
    descriptions = [description for description, _ in found]
    streams, scalars, values = merge(layout, descriptions)
    with ExitStack() as stack:
        work = together.on_first(lambda: _begin(target, stack, overwrite=overwrite))
        written = together.do(lambda: _write_rank(work, optimizer, streams, step, rank))

        def finish() -> None:
            rest = Rest({"step": step}, {"user": extra}, buffers(parts.model))
            if not weights_only:
                _add_state(rest, optimizer, [state for _, state in found], step, scalars, values)
            content = _finish(
                work,
                Contents(step, layout, streams, tuple(scalars), written, weights_only),
                rest,
            )
            crc = own_checksum(content)
            assert crc is not None
            replaced = newest_manifest(target.parent, step)
            if replaced is not None:
                write_latest(target.parent, target.name, crc, replaced)
            stack.close()
            write_latest(target.parent, target.name, crc)
            remove_leftovers(target.parent, step)

        together.on_first(finish)
    return target


def _begin(target: Path, stack: ExitStack, *, overwrite: bool) -> Path:
    require_run(target.parent)
    if os.path.lexists(target) and not overwrite:
        raise CheckpointError(
            f"{target}: this step is saved already: save with overwrite=True to replace it, or another step, or in "
            "another run directory (zerokit.check_run tells before training)"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target.parent}: cannot be created: {error.strerror}") from error
    return stack.enter_context(staged(target.absolute(), force=overwrite))


def _write_rank(
    work: Path, optimizer: ZeroOptimizer, streams: tuple[Stream, ...], step: int, rank: int
) -> Written:
    if not work.is_dir():
        raise CheckpointError(f"{work}: not there: the run directory is not shared between the nodes")
    parts = optimizer.parts
    weights_only = all(stream.kind in WEIGHT_KINDS for stream in streams)
    tensors = {
        (held.kind, held.part.parameter.name): held.tensor
        for held in own_slices(parts, rank, weights_only=weights_only)
    }
    file = rank_file(parts.layout, streams, step, rank)
    crcs = []
    path = work / file.name
    with new_file(path, file.size) as fd:
        write_exactly(fd, [file.header], 0, path)
        for extent in file.extents:
            data = host_bytes(tensors[streams[extent.stream].kind, extent.parameter.name])
            assert data.nbytes == extent.size
            crcs.append(crc32(data))
            write_exactly(fd, [data], extent.offset, path)
    return Written(file.size, len(file.header), crc32(file.header), crcs)


def _add_state(
    rest: Rest,
    optimizer: ZeroOptimizer,
    states: list[dict[str, bytes]],
    step: int,
    scalars: Mapping[Scalars, bytes],
    values: Mapping[str, Any],
) -> None:
    """What a checkpoint has beside parameters and buffers that is not cut."""
    rest.tensors += [
        Whole(
            f"optimizer/{scalar.kind}",
            scalar.dtype,
            (len(scalar.parameters), *scalar.shape),
            memoryview(data),
        )
        for scalar, data in scalars.items()
    ]
    record, generators = _generators(optimizer, states, step)
    rest.tensors += generators
    rest.plain |= {"rng": record, "scaler": _scaler(optimizer)}
    rest.encoded |= {"groups": _groups(optimizer), "values": dict(values)}


def _finish(work: Path, contents: Contents, rest: Rest) -> bytes:
    """Rank 0's part: common, extra and the manifest, whose bytes are returned."""
    layout, streams, step, written = contents.layout, contents.streams, contents.step, contents.written
    for rank, file in enumerate(written):
        path = work / file_name(rank, layout.world)
        if not path.exists() or path.stat().st_size != file.size:
            raise CheckpointError(
                f"{path}: rank {rank}'s file is not there: the run directory is not shared between the nodes"
            )
    plain, tensors = dict(rest.plain), list(rest.tensors)
    for key, value in rest.encoded.items():
        plain[key], found = encode(value, "extra" if key == "user" else key)
        tensors += [_whole(name, tensor) for name, tensor in found.items()]
    common = _write_common(work / COMMON_NAME, tensors)
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    write_file(work / EXTRA_NAME, text)
    content = Manifest(
        step,
        layout,
        streams,
        contents.scalars,
        _checksums(layout, streams, step, written),
        tuple(
            File(file_name(rank, layout.world), w.size, w.header_size, w.header_crc)
            for rank, w in enumerate(written)
        ),
        File(COMMON_NAME, common.size, 0, common.crc),
        File(EXTRA_NAME, len(text), 0, crc32(text)),
        contents.weights_only,
    ).to_bytes()
    write_file(work / NAME, content)
    return content


def _checksums(
    layout: Layout, streams: tuple[Stream, ...], step: int, written: list[Written]
) -> tuple[tuple[int, ...], ...]:
    """Every slice's CRC-32, from the order of the files to the manifest's."""
    crcs: dict[tuple[int, str, int], int] = {}
    for rank, file in enumerate(written):
        extents = rank_file(layout, streams, step, rank).extents
        for extent, crc in zip(extents, file.crcs, strict=True):
            crcs[extent.stream, extent.parameter.name, rank] = crc
    return tuple(
        tuple(crcs[number, name, rank] for name in names_of(layout, stream) for rank in layout.owners(name))
        for number, stream in enumerate(streams)
    )


def buffers(model: nn.Module) -> list[Whole]:
    """The persistent buffers of this rank, each once, under its first name."""
    transient = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return [
        _whole(f"buffers/{name}", buffer) for name, buffer in model.named_buffers() if name not in transient
    ]


def _groups(optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def _scaler(optimizer: ZeroOptimizer) -> dict[str, Any] | None:
    if optimizer.scaler is None:
        return None
    # As text, exactly: JSON numbers are read in many ways.
    return {"value": optimizer.scaler.value.hex(), "good_steps": optimizer.scaler.good_steps}


def _generators(
    optimizer: ZeroOptimizer, states: list[dict[str, bytes]], step: int
) -> tuple[dict[str, Any], list[Whole]]:
    """The record of all ranks' generators, and its tensors.

    States that a load has derived and nobody has drawn from since are written as what they were derived from.
    """
    origin = rng.ORIGINS.get(optimizer)
    if origin is not None and origin.digests == [rng.digest(state) for state in states]:
        record, stacked = origin.record, origin.stacked
    else:
        stacked = dict(rng.stack(states))
        record = {"world": len(states), "seed": torch.initial_seed() % 2**64, "step": step}
    return record, [
        Whole(f"rng/{name}", "uint8", shape, memoryview(data)) for name, (shape, data) in stacked.items()
    ]


def _whole(name: str, value: Any) -> Whole:
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    return Whole(name, dtype_name(tensor), tuple(tensor.shape), host_bytes(tensor))


def _write_common(path: Path, tensors: list[Whole]) -> Piece:
    """Write a safetensors file of whole tensors; returns its checksum and size."""
    tensors = sorted(tensors, key=lambda tensor: (-ELEMENT_BYTES[tensor.dtype], tensor.name))
    entries: dict[str, object] = {"__metadata__": {"format": "zerokit"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.data.nbytes],
        }
        offset += tensor.data.nbytes
    header = encode_header(entries)
    content: list[bytes | memoryview] = [header, *(tensor.data for tensor in tensors)]
    with new_file(path, len(header) + offset) as fd:
        write_exactly(fd, content, 0, path)
    return combine(Piece(crc32(piece), memoryview(piece).nbytes) for piece in content)
