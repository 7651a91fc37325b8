"""`load`: each rank reads the intervals it owns, whatever the world size that wrote them, and all verify the bytes."""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokit.checkpoint import rng
from zerokit.checkpoint.extra import GENERATOR_PREFIX, LOCAL_STEPS, decode
from zerokit.checkpoint.formats import open_source
from zerokit.checkpoint.formats.description import ModelNames, Rename
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.manifest import BUFFER_PREFIX, WEIGHT_KINDS, Manifest
from zerokit.checkpoint.matching import KERNEL_OPTIONS, NOT_THE_OPTIMIZERS, Match, Shared, match_state
from zerokit.checkpoint.requests import Request, read, requests_for
from zerokit.checkpoint.run import common_steps, find_step, island_runs, partners, step_name
from zerokit.checkpoint.snapshot import persistent_buffers, require_equal
from zerokit.checkpoint.source import Source, Tensors
from zerokit.checkpoint.state import Elements, outer_slices, own_slices, tensor_of
from zerokit.checkpoint.together import Together, finish_saving
from zerokit.errors import CheckpointError, UsageError
from zerokit.runtime import ZeroOptimizer
from zerokit.runtime.build import Runtime
from zerokit.text import printable

_STATE_LOST, _WEIGHTS_LOST = "the state is incomplete", "the weights are incomplete"

_NO_ISLANDS = -1
"""In place of a step, where the path is no run of islands."""


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
        strict: refuse what does not fit. Otherwise parameters, streams, buffers and groups that fit are taken (the
            weights alone of parameters that are trained on one side only), the rest is left as it is, and a warning
            lists it.
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
    runtime = optimizer.runtime
    together = Together(runtime.collectives)
    finish_saving(optimizer, together)
    if optimizer.islands is not None:
        path = _of_island(Path(path), optimizer, whole=not weights_only)
    while True:
        checkpoint = together.each(lambda: _opened(path, runtime, rename, whole=not weights_only))
        try:
            return _load(checkpoint, optimizer, together, strict=strict, weights_only=weights_only)
        except CheckpointError:
            # A save beside this load may have removed an older step: there is a newer one now.
            if not any(together.exchange(checkpoint.run is not None and not checkpoint.path.exists())):
                raise


def _of_island(path: Path, optimizer: ZeroOptimizer, *, whole: bool) -> Path:
    """Where this island finds its state: its own run's newest step of those that all have; else `path` itself."""
    assert optimizer.islands is not None
    if optimizer.local_steps is None:
        raise UsageError("load() into an island: create zerokit.LocalSteps(optimizer, every=...) first")
    runs = island_runs(path) if path.is_dir() else []
    own = common_steps(runs, whole=whole) if runs else {_NO_ISLANDS: ""}
    shared = set.intersection(*(set(one.items()) for one in optimizer.local_steps.at_load(own)))
    step, save = max(shared, default=(None, ""))
    if step == _NO_ISLANDS:
        return path
    if step is None:
        raise CheckpointError(
            f"{path}: islands have no step in common that is intact: each must see its own run"
        )
    # With more islands than were saved, several begin from one; of fewer, the first are gone on with.
    saved = partners(runs, save)
    return saved[optimizer.islands.index % len(saved)] / step_name(step)


def _opened(path: str | os.PathLike[str], runtime: Runtime, rename: Rename | None, *, whole: bool) -> Source:
    """The checkpoint, in whichever format, under the model's names."""
    source = open_source(path, whole=whole)
    if isinstance(source, ForeignCheckpoint):
        parameters = {parameter.name: parameter.aliases for parameter in runtime.layout.parameters}
        return source.fitted(ModelNames(parameters, persistent_buffers(runtime.model).keys()), rename)
    if rename is not None:
        raise UsageError(
            "rename applies to other frameworks' checkpoints only: zerokit's own has the model's names"
        )
    return source


def _load(
    checkpoint: Source, optimizer: ZeroOptimizer, together: Together, *, strict: bool, weights_only: bool
) -> Any:
    runtime = optimizer.runtime
    require_equal(
        f"the checkpoint in {checkpoint.run or checkpoint.path}",
        together.exchange(f"{checkpoint.path.name} with the manifest {checkpoint.manifest_crc:08x}"),
        "is the directory shared between the nodes, and is no other process saving?",
    )
    match, extra = together.each(
        lambda: _prepare(checkpoint, optimizer, strict=strict, weights_only=weights_only)
    )
    optimizer.zero_grad()
    runtime.settle()
    # Weights do not make up for a state that an earlier load has left incomplete.
    kept = optimizer.refusal if weights_only and _STATE_LOST in optimizer.refusal else ""
    lost = _WEIGHTS_LOST if weights_only else _STATE_LOST
    optimizer.refusal = (
        kept or f"loading {checkpoint.path} did not succeed, so {lost}: load again, or build the model anew"
    )
    local = optimizer.local_steps
    outer = {} if local is None or weights_only else local.expect(match.outer)
    if not weights_only:
        together.each(lambda: _make_states(checkpoint.manifest, runtime, match))
    for sources in match.rounds():
        requests = _requests(checkpoint, runtime, sources, together.rank, outer, weights_only=weights_only)
        pieces = together.each(partial(read, checkpoint, requests))
        checkpoint.require_right(together.exchange(pieces))
    if not weights_only:
        together.each(lambda: _apply(checkpoint, optimizer, match, extra))
        runtime.gradients.draws.begin(extra["step"])
    together.each(lambda: _apply_buffers(checkpoint, runtime, match, strict=strict))
    runtime.publish(frozen=True)
    if local is not None:
        together.each(lambda: local.restore(outer, None if weights_only else extra.get(LOCAL_STEPS)))
    if not weights_only:
        _restore_generators(checkpoint, optimizer, extra, together)
    elif optimizer.ema is not None:
        optimizer.ema.restart()  # the average was of other weights
    optimizer.refusal = kept
    notes = [*checkpoint.notes, *(f"{checkpoint.path}: {note}" for note in match.notes)]
    if notes and together.rank == 0:
        warnings.warn(printable("; ".join(notes)), stacklevel=2)
    if match.left_out and together.rank == 0:
        message = f"{checkpoint.path}: left as they were: {'; '.join(match.left_out)}"
        warnings.warn(printable(message), stacklevel=2)
    return extra["user"]


def _prepare(
    checkpoint: Source, optimizer: ZeroOptimizer, *, strict: bool, weights_only: bool
) -> tuple[Match, dict[str, Any]]:
    if checkpoint.weights_only and not weights_only:
        other = ""
        with suppress(CheckpointError):
            whole = find_step(checkpoint.path.parent, whole=True).path
            other = f', or continue from the newest whole one, zerokit.load("{whole}", optimizer)'
        raise CheckpointError(
            f"{checkpoint.path}: has weights but no optimizer state to continue from: load them with "
            f'zerokit.load("{checkpoint.path}", optimizer, weights_only=True){other}'
        )
    match = match_state(checkpoint.manifest, optimizer, strict=strict, weights_only=weights_only)
    return match, read_extra(checkpoint, weights_only=weights_only)


def read_extra(checkpoint: Source, *, weights_only: bool = False) -> dict[str, Any]:
    """`extra.json`, decoded; with the tensors of `common`. Beside weights only the user's own data is decoded."""
    plain = checkpoint.extra_plain()
    if not weights_only:
        checkpoint.check_generators(plain)
    tensors = Tensors(checkpoint, tensor_of)
    where = checkpoint.path / checkpoint.manifest.extra.name
    encoded = ("user",) if weights_only else ("user", "groups", "values", LOCAL_STEPS)
    return plain | {key: decode(plain[key], tensors, f"{where}: {key}") for key in encoded if key in plain}


def _requests(
    checkpoint: Source,
    runtime: Runtime,
    sources: Mapping[str, int],
    rank: int,
    outer: Mapping[str, Mapping[int, Tensor]],
    *,
    weights_only: bool,
) -> Iterator[Request]:
    """What this rank needs of the parameters in `sources`, which gives their positions in the checkpoint."""
    streams = checkpoint.manifest.numbers
    # A parameter is in one of the two streams of weights, and its values come from that one.
    weights = {position: number for (kind, position), number in streams.items() if kind in WEIGHT_KINDS}
    held = own_slices(runtime, rank, weights_only=weights_only, replicas=True)
    for one in chain(held, outer_slices(runtime.layout, rank, outer)):
        position = sources.get(one.part.parameter.name)
        if position is None:
            continue
        number = weights[position] if one.kind in WEIGHT_KINDS else streams.get((one.kind, position))
        if number is not None:
            elements = Elements(one.tensor, checkpoint.streams[number].dtype)
            yield from requests_for(checkpoint, number, position, one.part.interval, elements, 0)


def _make_states(manifest: Manifest, runtime: Runtime, match: Match) -> None:
    """Give each master the optimizer's states that its parameters have in the checkpoint."""
    streams = manifest.numbers
    kinds = sorted({stream.kind for stream in manifest.streams}.difference(WEIGHT_KINDS, match.unwanted))
    runtime.inner.state.clear()
    for unit, master, _ in runtime.masters():
        peers = [
            position
            for parameter in unit.unit.parameters
            if parameter.group == master.group and (position := match.sources.get(parameter.name)) is not None
        ]
        own: dict[str, Tensor] = {}
        for kind in kinds:
            dtypes = {
                manifest.streams[streams[kind, peer]].dtype
                for peer in peers
                if (kind, peer) in streams and (kind in NOT_THE_OPTIMIZERS or peer not in match.fresh)
            }
            if len(dtypes) > 1:
                raise CheckpointError(
                    f"{kind} of {unit.unit.name} has several dtypes: {', '.join(sorted(dtypes))}"
                )
            if dtypes:
                own[kind] = torch.zeros_like(master.tensor, dtype=getattr(torch, dtypes.pop()))
        if own:
            runtime.inner.state[master.tensor] = own


def _apply(checkpoint: Source, optimizer: ZeroOptimizer, match: Match, extra: Mapping[str, Any]) -> None:
    """Restore what is not cut: scalars, groups' options, the loss scale."""
    runtime = optimizer.runtime
    for live, source in match.groups.items():
        saved = extra["groups"][source]
        options = {key: value for key, value in saved.items() if key not in KERNEL_OPTIONS}
        runtime.inner.param_groups[live].update(options)
    # As torch's own load_state_dict: AdamW stays one with the options of Adam. States may be zerokit's own only.
    inner, states = runtime.inner, runtime.inner.state
    inner.__setstate__({"state": {}, "param_groups": inner.param_groups})
    inner.state = states
    shared = Shared(checkpoint, match, extra)
    for unit in runtime.units:
        if any(len({shared.key(unit, at) for at in unit.positions_in(one)}) > 1 for one in unit.masters):
            unit.divide(runtime.inner)
    for unit, master, _ in runtime.masters():
        shared.apply(runtime, unit, master)
    saved_scale = extra["scaler"]
    if optimizer.scaler is not None and saved_scale is not None:
        optimizer.scaler.restore(float.fromhex(saved_scale["value"]), int(saved_scale["good_steps"]))


def _apply_buffers(checkpoint: Source, runtime: Runtime, match: Match, *, strict: bool) -> None:
    tensors = Tensors(checkpoint, tensor_of)
    saved = {name.removeprefix(BUFFER_PREFIX) for name in tensors if name.startswith(BUFFER_PREFIX)}
    live = persistent_buffers(runtime.model)
    strange = sorted(live.keys() ^ saved)
    faults = [f"buffers {', '.join(strange[:5])} are on one side only"] if strange else []
    for name in sorted(live.keys() & saved):
        buffer, value = live[name], tensors[BUFFER_PREFIX + name]
        if value.shape != buffer.shape:
            faults.append(f"buffer {name} is {list(value.shape)} there and {list(buffer.shape)} here")
            continue
        for dim, stride in enumerate(buffer.stride()):
            # It repeats its elements (`expand`), and can be written to only once.
            if stride == 0 and buffer.shape[dim]:
                buffer, value = buffer.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
        with torch.no_grad():
            buffer.copy_(value)
    if faults and strict:
        raise CheckpointError(
            f"{checkpoint.path}: {'; '.join(faults)}: build the model that was saved, or load with strict=False"
        )
    match.left_out += faults


def _restore_generators(
    checkpoint: Source, optimizer: ZeroOptimizer, extra: Mapping[str, Any], together: Together
) -> None:
    record = extra["rng"]
    device = optimizer.runtime.collectives.device

    def restore() -> dict[str, Tensor]:
        stacked = {
            name.removeprefix(GENERATOR_PREFIX): tensor
            for name, tensor in Tensors(checkpoint, tensor_of).items()
            if name.startswith(GENERATOR_PREFIX)
        }
        if record["world"] != together.world or not stacked:
            rng.derive(record["seed"], record["step"], together.rank)
            return stacked
        try:
            rng.restore({name: bytes(each[together.rank].numpy()) for name, each in stacked.items()}, device)
        except (RuntimeError, TypeError, ValueError, struct.error) as error:
            raise CheckpointError(
                f"{checkpoint.path / checkpoint.manifest.common.name}: the states of the random generators are "
                "invalid: "
                f"{error}: take another checkpoint, or its weights with weights_only=True"
            ) from error
        return stacked

    stacked = together.each(restore)
    digests = together.exchange(rng.digest(rng.capture(device)))
    rng.ORIGINS[optimizer] = rng.Origin(dict(record), stacked, digests)
