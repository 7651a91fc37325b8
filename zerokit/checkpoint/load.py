"""`load`: each rank reads the intervals it owns, whatever the world size that wrote them, and all verify the bytes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokit.checkpoint import rng
from zerokit.checkpoint.checksum import Pieces
from zerokit.checkpoint.disk import is_there
from zerokit.checkpoint.expected import KERNEL_OPTIONS
from zerokit.checkpoint.extra import LOCAL_STEPS
from zerokit.checkpoint.formats import open_source
from zerokit.checkpoint.formats.description import ModelNames, Rename
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.frozen import require_same
from zerokit.checkpoint.landing import Landing
from zerokit.checkpoint.matching import Match, Shared
from zerokit.checkpoint.nodes.places import StepsOnNodes, places_of
from zerokit.checkpoint.plan import generators_of, plan_of
from zerokit.checkpoint.reading import FromFiles, Reading, requests_of
from zerokit.checkpoint.run import common_steps, island_runs, partners, step_name
from zerokit.checkpoint.snapshot import persistent_buffers, require_equal
from zerokit.checkpoint.source import Source, Tensors
from zerokit.checkpoint.staged import through
from zerokit.checkpoint.state import Held, outer_slices, slices_here, tensor_of
from zerokit.checkpoint.together import Together, finish_saving
from zerokit.errors import CheckpointError, UsageError, ZerokitWarning
from zerokit.files import path_of
from zerokit.runtime import ZeroOptimizer
from zerokit.runtime.build import Runtime
from zerokit.runtime.homes import Codes, decode
from zerokit.runtime.inner import parts_of
from zerokit.runtime.unit import UnitState
from zerokit.text import printable

_STATE_LOST, _WEIGHTS_LOST = "the state is incomplete", "the weights are incomplete"

_OWN_NAMES = "rename applies to other frameworks' checkpoints only: zerokit's own has the model's names"

_NO_ISLANDS = -1
"""In place of a step, where the path is no run of islands."""


def load(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    optimizer: ZeroOptimizer,
    *,
    strict: bool = True,
    weights_only: bool = False,
    rename: Rename | None = None,
) -> Any:
    """Load the whole training state from a checkpoint of any world size, stage, units and `bucket_mb`. Collective.

    Args:
        path: a step's directory, or a run's, whose newest complete step is taken; with `weights_only` also a step that
            has weights only. If its writer was killed before `latest` named it, a warning says so. Also a checkpoint of
            DeepSpeed (stages 1 to 3) or DCP (FSDP2), or with `weights_only` a Hugging Face folder or a file of
            `torch.save` with a state dict: no framework but torch is needed, and no pickle is executed. Or a list of
            places in which zerokit has saved, such as `["/dev/shm/run", "/nvme/run", "run"]`: directories of each
            node's own (`save(..., shared=False)`), and shared ones. The newest step is taken of which ranks see all
            files together, whatever nodes have them; what a node lacks, or has damaged, other ranks send. An older
            step is taken where no node has a part of the newer one undamaged, and a warning says so. Of later places
            files are read only if they have newer steps, or where the earlier ones have none.
        optimizer: its model and its parameter groups must have the same members as those that were saved.
        strict: refuse what does not fit. With False, parameters, streams, buffers and groups that fit are loaded, the
            rest stays as it is, and a warning lists it. Of a parameter that is trained on one side and frozen on the
            other, only the weights are loaded.
        weights_only: load parameters, trained or frozen, and buffers, from any checkpoint; the optimizer's states and
            groups, the loss scale and the generators stay as they are. An average of the weights (`zerokit.Ema`)
            begins anew, with the weights of its next `update`.
        rename: for another framework's checkpoint: what its parameters are called in the model, as a function of the
            name, or as prefixes and what replaces them, such as {"model.": ""}. Wrappers' prefixes, "module." and
            "_orig_mod.", need none.

    Random number generators are restored when the world size is the same, else seeded from (seed, step, rank).

    Returns what was given to `save` as `extra`. Where ranks gave different values, each gets its own; on another number
    of ranks such values are refused and named, and with strict=False or weights_only they are left out with a warning.

    Raises `CheckpointError` on every rank if any finds a fault. What does not fit is found before anything changes. If
    bytes turn out to be damaged, or cannot be read, while they replace the state, `optimizer.step()` is refused until a
    load succeeds. No older step is loaded in place of one that the operating system fails to read.
    """
    optimizer.require_own_weights("load()")
    runtime = optimizer.runtime
    together = Together(runtime.collectives)
    finish_saving(optimizer, together)
    places = places_of(path, together)
    if places is None:
        assert isinstance(path, str | os.PathLike)
        return _load_shared(path, optimizer, together, rename, strict=strict, weights_only=weights_only)
    if optimizer.islands is not None:
        raise UsageError("load() into an island: name one directory, not several places or a node's own")
    if rename is not None:
        raise UsageError(_OWN_NAMES)
    steps = StepsOnNodes(places, together, whole=not weights_only)
    for reading in steps.readings():
        try:
            extra = _load(reading, optimizer, together, strict=strict, weights_only=weights_only)
        except CheckpointError as error:
            steps.note_failure(error)
        else:
            steps.take(reading, optimizer)
            return extra
    raise steps.failure()


def _load_shared(
    path: str | os.PathLike[str],
    optimizer: ZeroOptimizer,
    together: Together,
    rename: Rename | None,
    *,
    strict: bool,
    weights_only: bool,
) -> Any:
    if optimizer.islands is not None:
        path = _of_island(path_of(path), optimizer, together, whole=not weights_only)
    while True:
        checkpoint = together.each(lambda: _opened(path, optimizer.runtime, rename, whole=not weights_only))
        try:
            return _load(FromFiles(checkpoint), optimizer, together, strict=strict, weights_only=weights_only)
        except CheckpointError:
            # A save beside this load may have removed an older step: there is a newer one now.
            gone = together.each(partial(_removed, checkpoint))
            if not any(together.exchange(gone)):
                raise


def _removed(checkpoint: Source) -> bool:
    return checkpoint.run is not None and not is_there(checkpoint.path)


def _of_island(path: Path, optimizer: ZeroOptimizer, together: Together, *, whole: bool) -> Path:
    """Where this island finds its state: its own run's newest step of those that all have; else `path` itself."""
    assert optimizer.islands is not None
    if optimizer.local_steps is None:
        raise UsageError("load() into an island: create zerokit.LocalSteps(optimizer, every=...) first")

    def look() -> tuple[list[Path], dict[int, str]]:
        runs = island_runs(path)
        return runs, common_steps(runs, whole=whole) if runs else {_NO_ISLANDS: ""}

    runs: list[Path] = []
    own: dict[int, str] = {}
    fault: CheckpointError | None = None
    try:
        runs, own = together.each(look)
    except CheckpointError as error:
        fault = error
    # Other islands do not wait for this one in vain: with nothing of it they share nothing.
    shared = set.intersection(*(set(one.items()) for one in optimizer.local_steps.at_load(own)))
    if fault is not None:
        raise fault
    step, save = max(shared, default=(None, ""))
    if step == _NO_ISLANDS:
        return path
    if step is None:
        raise CheckpointError(
            f"{path}: islands have no step in common that is intact: each must see its own run (if one could not read "
            "its own, its ranks say why)"
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
        raise UsageError(_OWN_NAMES)
    return source


def _load(
    reading: Reading, optimizer: ZeroOptimizer, together: Together, *, strict: bool, weights_only: bool
) -> Any:
    runtime, checkpoint = optimizer.runtime, reading.source
    require_equal(
        f"the checkpoint in {checkpoint.run or checkpoint.path}",
        together.exchange(f"{checkpoint.path.name} with the manifest {checkpoint.manifest_crc:08x}"),
        "is the directory shared between the nodes, and is no other process saving?",
    )
    # Everything that may not fit is found here, before anything changes.
    plan = together.each(
        lambda: plan_of(checkpoint, optimizer, together, strict=strict, weights_only=weights_only)
    )
    match, extra = plan.match, plan.extra
    require_same(checkpoint, match, optimizer, together, strict=strict, weights_only=weights_only)
    local = optimizer.local_steps
    outer = {} if local is None or weights_only else local.expect(match.outer)
    if local is not None:
        _take_outer(reading, runtime, match, outer, together)
        together.each(lambda: local.require_loadable(outer, extra.get(LOCAL_STEPS)))
    # Weights do not make up for a state that an earlier load has left incomplete.
    kept = optimizer.refusal if weights_only and _STATE_LOST in optimizer.refusal else ""
    lost = _WEIGHTS_LOST if weights_only else _STATE_LOST
    optimizer.refusal = (
        kept or f"loading {checkpoint.path} did not succeed, so {lost}: load again, or build the model anew"
    )
    if plan.shared is not None:
        runtime.home.renew()
    optimizer.zero_grad()
    runtime.settle()
    if plan.shared is not None:
        together.each(lambda: _make_states(runtime, plan.states))
    with through(runtime.collectives.device, Landing) as landing:
        for sources in match.rounds():
            _read_states(reading, sources, runtime, together, landing, weights_only=weights_only)
    if plan.shared is not None:
        shared = plan.shared
        reading.bring(shared.files(runtime))
        together.each(lambda: _apply(optimizer, match, shared, extra))
        runtime.control.resume(checkpoint.manifest.skips)
        runtime.gradients.draws.begin(extra["step"])
    together.each(lambda: _apply_buffers(checkpoint, plan.buffers))
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
        warnings.warn(printable("; ".join(notes)), ZerokitWarning, stacklevel=2)
    if match.left_out and together.rank == 0:
        message = f"{checkpoint.path}: left as they were: {'; '.join(match.left_out)}"
        warnings.warn(printable(message), ZerokitWarning, stacklevel=2)
    return extra["user"]


def _take_outer(
    reading: Reading,
    runtime: Runtime,
    match: Match,
    outer: Mapping[str, Mapping[int, Tensor]],
    together: Together,
) -> None:
    for sources in match.rounds():
        _read(reading, sources, outer_slices(runtime.layout, together.rank, outer), together)


def _read_states(
    reading: Reading,
    sources: Mapping[str, int],
    runtime: Runtime,
    together: Together,
    landing: Landing | None,
    *,
    weights_only: bool,
) -> None:
    found: list[Pieces] = []

    def read_units(present: Sequence[UnitState]) -> None:
        held = slices_here(runtime, present, weights_only=weights_only)
        scaled: list[tuple[Tensor, Tensor]] = []
        found.append(reading.read(requests_of(reading.source, sources, held, scaled, landing)))
        for codes, scales in scaled:
            decode(Codes(codes, scales), codes)

    def read_all() -> Pieces:
        found.clear()
        runtime.home.tour(runtime.units, read_units, writes=True)
        return Pieces.joined(found)

    while not reading.settle(together.exchange(together.each(read_all))):
        pass


def _read(reading: Reading, sources: Mapping[str, int], held: Iterable[Held], together: Together) -> None:
    wanted = list(held)

    def read_all() -> Pieces:
        return reading.read(requests_of(reading.source, sources, wanted, [], None))

    while not reading.settle(together.exchange(together.each(read_all))):
        pass


def _make_states(runtime: Runtime, states: Iterable[Mapping[str, torch.dtype]]) -> None:
    """Give each master room for its states."""
    runtime.inner.state.clear()
    kinds = dict(zip((master for _, master, _ in runtime.masters()), states, strict=True))

    def make(present: Sequence[UnitState]) -> None:
        for master in (master for unit in present for master in unit.masters):
            if kinds[master]:
                runtime.inner.state[master.tensor] = {
                    kind: torch.zeros_like(master.tensor, dtype=dtype)
                    for kind, dtype in kinds[master].items()
                }

    runtime.home.tour(runtime.units, make, writes=True)


def _apply(optimizer: ZeroOptimizer, match: Match, shared: Shared, extra: Mapping[str, Any]) -> None:
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
    parts_of(inner)  # have them, too
    for unit in runtime.units:
        if any(len({shared.key(unit, at) for at in unit.positions_in(one)}) > 1 for one in unit.masters):
            unit.divide(runtime.inner)

    def apply(present: Sequence[UnitState]) -> None:
        for unit in present:
            for master in unit.masters:
                shared.apply(runtime, unit, master)

    runtime.home.tour(runtime.units, apply, writes=True)
    saved_scale = extra["scaler"]
    if optimizer.scaler is not None and saved_scale is not None:
        value, good_steps = float.fromhex(saved_scale["value"]), int(saved_scale["good_steps"])
        optimizer.scaler = optimizer.scaler.restored(value, good_steps)


def _apply_buffers(checkpoint: Source, buffers: Mapping[str, Tensor]) -> None:
    tensors = Tensors(checkpoint, tensor_of)
    for name, live in buffers.items():
        buffer, value = live, tensors[name]
        for dim, stride in enumerate(buffer.stride()):
            # It repeats its elements (`expand`), and can be written to only once.
            if stride == 0 and buffer.shape[dim]:
                buffer, value = buffer.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
        with torch.no_grad():
            buffer.copy_(value)


def _restore_generators(
    checkpoint: Source, optimizer: ZeroOptimizer, extra: Mapping[str, Any], together: Together
) -> None:
    record = extra["rng"]
    device = optimizer.runtime.collectives.device

    def restore() -> dict[str, Tensor]:
        stacked = generators_of(checkpoint)
        if record["world"] != together.world or not stacked:
            rng.derive(record["seed"], record["step"], together.rank)
        else:
            rng.restore({name: bytes(each[together.rank].numpy()) for name, each in stacked.items()}, device)
        return stacked

    stacked = together.each(restore)
    digests = together.exchange(rng.digest(rng.capture(device)))
    rng.ORIGINS[optimizer] = rng.Origin(dict(record), stacked, digests)
