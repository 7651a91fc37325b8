"""The plan of a load: what is taken from a checkpoint. Whatever may not fit is found here, before anything changes."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerokit.checkpoint import rng
from zerokit.checkpoint.by_rank import Member, decode_by_rank, shown
from zerokit.checkpoint.extra import GENERATOR_PREFIX, LOCAL_STEPS, decode
from zerokit.checkpoint.manifest import BUFFER_PREFIX, WEIGHT_KINDS, Manifest
from zerokit.checkpoint.matching import NOT_THE_OPTIMIZERS, Match, Shared, match_state
from zerokit.checkpoint.run import find_step
from zerokit.checkpoint.snapshot import persistent_buffers
from zerokit.checkpoint.source import Source, Tensors
from zerokit.checkpoint.state import tensor_of
from zerokit.checkpoint.together import Together
from zerokit.errors import CheckpointError
from zerokit.runtime import ZeroOptimizer
from zerokit.runtime.build import Runtime
from zerokit.runtime.masters import WholeMaster


@dataclass(frozen=True, slots=True)
class Plan:
    """What is taken from a checkpoint: all of it fits."""

    match: Match
    extra: dict[str, Any]
    buffers: dict[str, Tensor]
    """Live ones, by their names in `common`."""
    states: list[dict[str, torch.dtype]]
    """For each master, the states it has there."""
    shared: Shared | None
    """None where weights alone are taken."""


def plan_of(
    checkpoint: Source, optimizer: ZeroOptimizer, together: Together, *, strict: bool, weights_only: bool
) -> Plan:
    """The plan for this rank. Raises `CheckpointError` for what does not fit; with `strict=False` that is left out.

    Raises `UsageError` for an optimizer that no load can mend.
    """
    optimizer.require_loadable()
    if checkpoint.weights_only and not weights_only:
        other = ""
        with suppress(CheckpointError):
            whole = find_step(checkpoint.path.parent, whole=True).path
            other = f', or continue from the newest whole one, zerokit.load("{whole}", optimizer)'
        raise CheckpointError(
            f"{checkpoint.path}: has weights but no optimizer state to continue from: load them with "
            f'zerokit.load("{checkpoint.path}", optimizer, weights_only=True){other}'
        )
    if checkpoint.run is None:  # of a run's newest step that is known
        checkpoint.check_files()
    match = match_state(checkpoint, optimizer, strict=strict, weights_only=weights_only)
    collectives = optimizer.runtime.collectives
    ranks = checkpoint.manifest.extra_ranks
    left_out = [] if ranks == collectives.world else checkpoint.by_rank
    if left_out and strict and not weights_only:
        names = ", ".join(map(shown, left_out))
        raise CheckpointError(
            f"{checkpoint.path}: each of the {ranks} ranks that saved it gave another {names}, and "
            f"{collectives.world} load it: load it with {ranks}, or with strict=False, which leaves that out "
            f'(zerokit.Checkpoint("{checkpoint.path}").extra()["user"] has it of all ranks)'
        )
    match.left_out += [f"{shown(name)}, which {ranks} ranks gave each for itself" for name in left_out]
    rank = collectives.rank
    extra = read_extra(checkpoint, rank=rank, left_out=left_out, weights_only=weights_only)
    buffers = {
        BUFFER_PREFIX + name: buffer
        for name, buffer in persistent_buffers(optimizer.runtime.model).items()
        if name in match.buffers
    }
    if weights_only:
        return Plan(match, extra, buffers, [], None)
    _check_generators(checkpoint, extra["rng"], together.rank, together.world, collectives.device)
    states = _states(checkpoint.manifest, optimizer.runtime, match)
    return Plan(match, extra, buffers, states, Shared(checkpoint, match, extra))


def read_extra(
    checkpoint: Source, *, rank: int, left_out: Collection[Member] = (), weights_only: bool = False
) -> dict[str, Any]:
    """`extra.json`, decoded, with the tensors of `common`: as `rank` gave it to `save`, without what is `left_out`.

    Beside weights only the user's own data is decoded.
    """
    plain = checkpoint.extra_plain()
    if not weights_only:
        checkpoint.check_generators(plain)
    tensors = Tensors(checkpoint, tensor_of)
    where = checkpoint.path / checkpoint.manifest.extra.name
    user = {"user": decode_by_rank(plain["user"], tensors, f"{where}: user", rank, left_out)}
    encoded = () if weights_only else ("groups", "values", LOCAL_STEPS)
    return plain | user | {k: decode(plain[k], tensors, f"{where}: {k}") for k in encoded if k in plain}


def _states(manifest: Manifest, runtime: Runtime, match: Match) -> list[dict[str, torch.dtype]]:
    """For each master, the optimizer's states that its parameters have in the checkpoint."""
    streams = manifest.numbers
    kinds = sorted(
        {s.kind for s in manifest.streams if s.block == 1}.difference(WEIGHT_KINDS, match.unwanted)
    )
    found = []
    for unit, master, _ in runtime.masters():
        line = unit.unit.parameters
        members = [line[master.whole.position]] if isinstance(master, WholeMaster) else line
        peers = [
            position
            for parameter in members
            if parameter.group == master.group and (position := match.sources.get(parameter.name)) is not None
        ]
        own: dict[str, torch.dtype] = {}
        for kind in kinds:
            dtypes = {
                _loaded_dtype(manifest, streams[kind, peer], peer)
                for peer in peers
                if (kind, peer) in streams and (kind in NOT_THE_OPTIMIZERS or peer not in match.fresh)
            }
            if len(dtypes) > 1:
                raise CheckpointError(
                    f"{kind} of {unit.unit.name} has several dtypes: {', '.join(sorted(dtypes))}"
                )
            if dtypes:
                own[kind] = getattr(torch, dtypes.pop())
        found.append(own)
    return found


def _loaded_dtype(manifest: Manifest, stream: int, position: int) -> str:
    """The dtype of a state in memory: codes become what they stand for."""
    return "float32" if manifest.scales(stream, position) is not None else manifest.streams[stream].dtype


def _check_generators(
    checkpoint: Source, record: Mapping[str, Any], rank: int, world: int, device: torch.device
) -> None:
    """Raise `CheckpointError` for states that these generators do not take; they are as before."""
    stacked = generators_of(checkpoint)
    if record["world"] != world:
        return
    own = rng.capture(device)
    try:
        rng.restore({name: bytes(each[rank].numpy()) for name, each in stacked.items()}, device)
    except (RuntimeError, TypeError, ValueError, struct.error) as error:
        raise CheckpointError(
            f"{checkpoint.path / checkpoint.manifest.common.name}: the states of the random generators are invalid: "
            f"{error}: take another checkpoint, or its weights with weights_only=True"
        ) from error
    finally:
        rng.restore(own, device)


def generators_of(checkpoint: Source) -> dict[str, Tensor]:
    """States of all ranks' generators, uint8 [world, bytes], by generator."""
    return {
        name.removeprefix(GENERATOR_PREFIX): tensor
        for name, tensor in Tensors(checkpoint, tensor_of).items()
        if name.startswith(GENERATOR_PREFIX)
    }
