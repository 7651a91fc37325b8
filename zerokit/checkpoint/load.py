"""`load`: each rank reads the intervals it owns, whatever the world size that wrote them, and all verify the bytes."""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerokit.checkpoint import background, plan, requests, rng
from zerokit.checkpoint.checksum import Piece
from zerokit.checkpoint.common import Tensors
from zerokit.checkpoint.extra import decode
from zerokit.checkpoint.formats import open_source
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint, ModelNames, Rename
from zerokit.checkpoint.manifest import BUFFER_PREFIX, WEIGHT_KINDS
from zerokit.checkpoint.matching import Match, match_state
from zerokit.checkpoint.plan import PieceKey
from zerokit.checkpoint.requests import Request
from zerokit.checkpoint.rest import GENERATOR_PREFIX
from zerokit.checkpoint.run import find_step
from zerokit.checkpoint.shared import Shared
from zerokit.checkpoint.snapshot import persistent_buffers
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.state import flats, host_bytes, members, within
from zerokit.checkpoint.together import Together
from zerokit.errors import CheckpointError, UsageError
from zerokit.runtime import ZeroOptimizer
from zerokit.runtime.build import Parts
from zerokit.runtime.flats import divide_flats
from zerokit.runtime.states import EMA
from zerokit.runtime.step import write_back
from zerokit.text import printable

_STATE_LOST, _WEIGHTS_LOST = "the state is incomplete", "the weights are incomplete"

_KERNEL_OPTIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""How an optimizer computes is the running program's business, not the checkpoint's."""


@dataclass(frozen=True, slots=True)
class Want(plan.Want):
    """Elements to read into `tensor`, flat."""

    tensor: Tensor


def load(
    path: str | os.PathLike[str],
    optimizer: ZeroOptimizer,
    *,
    strict: bool = True,
    weights_only: bool = False,
    rename: Rename | None = None,
) -> Any:
    """Take the whole training state from a checkpoint of any world size, stage, units and `bucket_mb`. Collective.

    Args:
        path: a step's directory, or a run's, whose newest step is taken: the highest that is whole (with
            `weights_only`, or has weights only), even where its writer was killed before `latest` named it, which
            is a warning. Also a checkpoint of DeepSpeed (stages 1 to 3) or DCP (FSDP2), or with `weights_only` a
            Hugging Face folder: no framework but torch is needed, and no pickle is executed.
        optimizer: its model and its parameter groups must have the same members as those that were saved.
        strict: refuse what does not fit. Otherwise parameters, streams, buffers and groups that fit are taken, the rest
            is left as it is, and a warning lists it.
        weights_only: take parameters, trained there or frozen, and buffers, from any checkpoint; the optimizer's states
            and groups, the loss scale and the generators stay as they are. An average of the weights (`zerokit.Ema`)
            begins anew, with the weights of its next `update`.
        rename: of another framework's checkpoint: what its parameters are called in the model, as a function of the
            name, or as prefixes and what replaces them, such as {"model.": ""}. Wrappers' prefixes, "module." and
            "_orig_mod.", need none.

    Random number generators are restored when the world size is the same, else seeded from (seed, step, rank).

    Returns what was given to `save` as `extra`. Raises `CheckpointError` on every rank if any finds a fault; if some
    state had been read by then, `optimizer.step()` is refused until a load succeeds.
    """
    optimizer.require_own_weights("load()")
    parts = optimizer.parts
    failed = background.failure(optimizer)
    together = Together(parts.collectives)
    together.raise_any(failed)
    while True:
        checkpoint = together.each(lambda: _opened(path, parts, rename, whole=not weights_only))
        try:
            return _load(checkpoint, optimizer, together, strict=strict, weights_only=weights_only)
        except CheckpointError:
            # A save beside this load may have removed an older step: there is a newer one now.
            if not any(together.exchange(checkpoint.run is not None and not checkpoint.path.exists())):
                raise


def _opened(path: str | os.PathLike[str], parts: Parts, rename: Rename | None, *, whole: bool) -> Source:
    """The checkpoint, in whichever format, under the model's names."""
    source = open_source(path, whole=whole)
    if isinstance(source, ForeignCheckpoint):
        parameters = {parameter.name: parameter.aliases for parameter in parts.layout.parameters}
        return source.fitted(ModelNames(parameters, persistent_buffers(parts.model).keys()), rename)
    if rename is not None:
        raise UsageError(
            "rename is of other frameworks' checkpoints: zerokit's own has the names that were saved"
        )
    return source


def _load(
    checkpoint: Source, optimizer: ZeroOptimizer, together: Together, *, strict: bool, weights_only: bool
) -> Any:
    parts = optimizer.parts
    seen = together.exchange((checkpoint.path.name, checkpoint.manifest_crc))
    if len(set(seen)) > 1:
        ranks = {step: [str(rank) for rank, one in enumerate(seen) if one == step] for step in seen}
        each = (
            f"rank{'s' if len(those) > 1 else ''} {', '.join(those)}: {name} with the manifest {crc:08x}"
            for (name, crc), those in ranks.items()
        )
        raise CheckpointError(
            f"{checkpoint.run or checkpoint.path}: ranks see different checkpoints ({'; '.join(each)}): is the "
            "directory shared between the nodes, and is no other process saving?"
        )
    match, extra = together.each(
        lambda: _prepare(
            checkpoint, parts, averaged=optimizer.ema is not None, strict=strict, weights_only=weights_only
        )
    )
    optimizer.zero_grad()
    parts.gathering.free_all()
    # Weights do not make up for a state that an earlier load has left incomplete.
    kept = optimizer.refusal if weights_only and _STATE_LOST in optimizer.refusal else ""
    lost = _WEIGHTS_LOST if weights_only else _STATE_LOST
    optimizer.refusal = (
        kept or f"loading {checkpoint.path} did not succeed, so {lost}: load again, or build the model anew"
    )
    pieces = together.each(
        lambda: _read_all(checkpoint, parts, match, together.rank, weights_only=weights_only)
    )
    by_rank = together.exchange(pieces)
    faults = checkpoint.faults(by_rank)
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(f"{checkpoint.path}: {'; '.join(faults[:3])}{more}")
    if not weights_only:
        together.each(lambda: _apply(checkpoint, optimizer, match, extra))
    together.each(lambda: _apply_buffers(checkpoint, parts, match, strict=strict))
    write_back(parts.storages)
    for storage in parts.storages:
        if not storage.unit.trainable:
            storage.gather_kept()
    parts.gathering.gather_updated()
    if not weights_only:
        _restore_generators(checkpoint, optimizer, extra, together)
    elif optimizer.ema is not None:
        optimizer.ema.restart()  # the average was of other weights
    optimizer.refusal = kept
    if checkpoint.notes and together.rank == 0:
        warnings.warn(printable("; ".join(checkpoint.notes)), stacklevel=2)
    if match.left_out and together.rank == 0:
        message = f"{checkpoint.path}: left as they were: {'; '.join(match.left_out)}"
        warnings.warn(printable(message), stacklevel=2)
    return extra["user"]


def _prepare(
    checkpoint: Source, parts: Parts, *, averaged: bool, strict: bool, weights_only: bool
) -> tuple[Match, dict[str, Any]]:
    """How the checkpoint fits, and its `extra.json`."""
    if checkpoint.weights_only and not weights_only and checkpoint.format != "zerokit":
        raise CheckpointError(
            f"{checkpoint.path}: has weights but no optimizer's state: take them with "
            f'zerokit.load("{checkpoint.path}", optimizer, weights_only=True)'
        )
    if checkpoint.weights_only and not weights_only:
        other = "load a whole one"
        with suppress(CheckpointError):
            whole = find_step(checkpoint.path.parent, whole=True).path
            other = f'go on from the newest whole one, zerokit.load("{whole}", optimizer)'
        raise CheckpointError(
            f"{checkpoint.path}: was saved with weights_only=True, so it has no optimizer's state to go on from: take "
            f'its weights with zerokit.load("{checkpoint.path}", optimizer, weights_only=True), or {other}'
        )
    match = match_state(
        checkpoint.manifest, parts, averaged=averaged, strict=strict, weights_only=weights_only
    )
    return match, read_extra(checkpoint, weights_only=weights_only)


def read_extra(checkpoint: Source, *, weights_only: bool = False) -> dict[str, Any]:
    """`extra.json`, decoded; with the tensors of `common`. Beside weights only the user's own data is decoded."""
    plain = checkpoint.extra_plain()
    if not weights_only:
        checkpoint.check_generators(plain)
    tensors = Tensors(checkpoint)
    where = checkpoint.path / checkpoint.manifest.extra.name
    encoded = ("user",) if weights_only else ("user", "groups", "values")
    return plain | {key: decode(plain[key], tensors, f"{where}: {key}") for key in encoded}


def _wants(
    checkpoint: Source, parts: Parts, match: Match, rank: int, *, weights_only: bool
) -> Iterator[Want]:
    """What this rank needs; the optimizer's states, if they are wanted, are made on the way."""
    manifest = checkpoint.manifest
    streams: dict[tuple[str, int], int] = {
        (stream.kind, position): number
        for number, stream in enumerate(manifest.streams)
        for position in stream.parameters
    }
    # A parameter is in one of the two streams of weights, and its values come from that one.
    weights = {position: number for (kind, position), number in streams.items() if kind in WEIGHT_KINDS}
    line = list(manifest.layout.parameters)
    kinds = (
        []
        if weights_only
        else sorted({stream.kind for stream in manifest.streams}.difference(WEIGHT_KINDS, match.unwanted))
    )
    for storage in parts.storages:
        if storage.unit.trainable:
            continue
        for part in storage.unit.owned(rank):
            position = match.sources.get(part.parameter.name)
            if position is not None:
                tensor = storage.slice_of(part.memory)
                yield Want(weights[position], position, line[position].name, part.interval, tensor)
    if not weights_only:
        parts.inner.state.clear()
    for storage, flat, _ in flats(parts):
        peers = [
            position
            for parameter in storage.unit.parameters
            if parameter.group == flat.group and (position := match.sources.get(parameter.name)) is not None
        ]
        own: dict[str, Tensor] = {}
        for kind in kinds:
            dtypes = {
                manifest.streams[streams[kind, peer]].dtype for peer in peers if (kind, peer) in streams
            }
            if len(dtypes) > 1:
                raise CheckpointError(
                    f"{kind} of {storage.unit.name} has several dtypes: {', '.join(sorted(dtypes))}"
                )
            if dtypes:
                dtype = getattr(torch, dtypes.pop())
                # An average of weights that are not in the checkpoint begins with them.
                own[kind] = (
                    flat.tensor.detach().to(dtype, copy=True)
                    if kind == EMA
                    else torch.zeros_like(flat.tensor, dtype=dtype)
                )
        if own:
            parts.inner.state[flat.tensor] = own
        for part in members(storage, flat):
            position = match.sources.get(part.parameter.name)
            if position is None:
                continue
            wanted = [(weights[position], flat.tensor.detach())]
            wanted += [
                (streams[kind, position], whole) for kind, whole in own.items() if (kind, position) in streams
            ]
            for number, whole in wanted:
                yield Want(number, position, line[position].name, part.interval, within(flat, whole, part))


def _read_all(
    checkpoint: Source, parts: Parts, match: Match, rank: int, *, weights_only: bool
) -> dict[PieceKey, Piece]:
    """Read what this rank needs into its tensors, file by file; returns the checksums of the pieces."""
    reads: dict[int, list[Request]] = {}
    for want in _wants(checkpoint, parts, match, rank, weights_only=weights_only):
        stream = checkpoint.streams[want.stream]
        for stretch in checkpoint.locate(want.stream, want.name, want.interval):
            part = stretch.interval
            start = part.start - want.interval.start
            reads.setdefault(stretch.file, []).append(
                Request(
                    PieceKey(want.stream, want.position, stretch.file, part.start),
                    stretch.offset,
                    part.numel * stream.element_bytes,
                    want.tensor[start : start + part.numel],
                    stream.dtype,
                )
            )
    pieces: dict[PieceKey, Piece] = {}
    for file in sorted(reads):
        with checkpoint.open_file(file) as fd:
            pieces |= requests.read(fd, reads[file], checkpoint.file_path(file))
    return pieces


def _apply(checkpoint: Source, optimizer: ZeroOptimizer, match: Match, extra: Mapping[str, Any]) -> None:
    """Restore what is not cut: scalars, groups' options, the loss scale."""
    parts = optimizer.parts
    for live, source in match.groups.items():
        saved = extra["groups"][source]
        options = {key: value for key, value in saved.items() if key not in _KERNEL_OPTIONS}
        parts.inner.param_groups[live].update(options)
    shared = Shared(checkpoint, match, extra)
    for storage in parts.storages:
        divide_flats(storage, parts.inner, partial(shared.key, storage))
        storage.guard_flats()
        for flat in storage.flats:
            held = [storage.unit.parameters[position].name for position in storage.positions_in(flat)]
            if held and not any(name in match.sources for name in held):
                parts.inner.state.pop(
                    flat.tensor, None
                )  # new to the checkpoint: it begins with its first step
            else:
                shared.apply(parts, storage, flat)
    saved_scale = extra["scaler"]
    if optimizer.scaler is not None and saved_scale is not None:
        optimizer.scaler.value = float.fromhex(saved_scale["value"])
        optimizer.scaler.good_steps = int(saved_scale["good_steps"])


def _apply_buffers(checkpoint: Source, parts: Parts, match: Match, *, strict: bool) -> None:
    tensors = Tensors(checkpoint)
    saved = {name.removeprefix(BUFFER_PREFIX) for name in tensors if name.startswith(BUFFER_PREFIX)}
    live = persistent_buffers(parts.model)
    if strange := sorted(live.keys() ^ saved):
        text = f"buffers {', '.join(strange[:5])} are on one side only"
        if strict:
            raise CheckpointError(
                f"{checkpoint.path}: {text}: build the model that was saved, or load with strict=False"
            )
        match.left_out.append(text)
    for name in sorted(live.keys() & saved):
        buffer, value = live[name], tensors[BUFFER_PREFIX + name]
        if value.shape == buffer.shape:
            with torch.no_grad():
                buffer.copy_(value)
            continue
        text = f"buffer {name} is {list(value.shape)} there and {list(buffer.shape)} here"
        if strict:
            raise CheckpointError(f"{checkpoint.path}: {text}")
        match.left_out.append(text)


def _restore_generators(
    checkpoint: Source, optimizer: ZeroOptimizer, extra: Mapping[str, Any], together: Together
) -> None:
    record = extra["rng"]
    device = optimizer.parts.collectives.device

    def restore() -> dict[str, tuple[tuple[int, ...], bytes]]:
        tensors = Tensors(checkpoint)
        stacked = {}
        for name in [name for name in tensors if name.startswith(GENERATOR_PREFIX)]:
            tensor = tensors[name]
            stacked[name.removeprefix(GENERATOR_PREFIX)] = (tuple(tensor.shape), bytes(host_bytes(tensor)))
        if record["world"] != together.world or not stacked:
            rng.derive(record["seed"], record["step"], together.rank)
            return stacked
        try:
            rng.restore(rng.unstack(stacked, together.rank), device)
        except (RuntimeError, TypeError, ValueError, struct.error) as error:
            raise CheckpointError(
                f"{checkpoint.path / checkpoint.manifest.common.name}: the states of the generators are not ones: "
                f"{error}: take another checkpoint, or its weights with weights_only=True"
            ) from error
        return stacked

    stacked = together.each(restore)
    digests = together.exchange(rng.digest(rng.capture(device)))
    rng.ORIGINS[optimizer] = rng.Origin(dict(record), stacked, digests)
