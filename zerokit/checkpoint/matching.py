"""Matches a checkpoint to a live model and optimizer, by name: parameters, streams, groups and shared states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from zerokit.checkpoint.manifest import WEIGHT_KINDS, Manifest, Scalars
from zerokit.checkpoint.safetensors import Stream
from zerokit.checkpoint.small_floats import PACKED
from zerokit.checkpoint.snapshot import persistent_buffers
from zerokit.checkpoint.source import Source, Tensors
from zerokit.checkpoint.state import MASTER, OUTER_PREFIX, PARAM, dtype_name, host_bytes, tensor_of
from zerokit.errors import CheckpointError, UnsupportedOptimizer
from zerokit.layout import Layout, Parameter
from zerokit.runtime import ZeroOptimizer
from zerokit.runtime.build import Runtime
from zerokit.runtime.masters import Master
from zerokit.runtime.states import EMA
from zerokit.runtime.trials import probe
from zerokit.runtime.unit import UnitState

NOT_THE_OPTIMIZERS = frozenset({EMA})
"""States of a master that zerokit keeps itself."""
RESIDUAL = "wire_residual"
"""A stream of earlier versions: what an int8 or int4 wire had rounded away of gradients, to be added to later ones."""
KERNEL_OPTIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""How an optimizer computes is the running program's business, not the checkpoint's."""
_NAMED = 5
"""Names that an error lists."""


@dataclass
class Match:
    """The match of a checkpoint and a live optimizer."""

    sources: dict[str, int] = field(default_factory=dict)
    """Each parameter's position in the checkpoint's line, by its live name."""
    groups: dict[int, int] = field(default_factory=dict)
    """The checkpoint's group for each live one."""
    buffers: set[str] = field(default_factory=set)
    """Names of persistent buffers that both have alike."""
    unwanted: set[str] = field(default_factory=set)
    """Streams that nothing here uses."""
    fresh: set[int] = field(default_factory=set)
    """Positions whose states are another optimizer's: they begin anew."""
    outer: list[str] = field(default_factory=list)
    """Streams of `zerokit.LocalSteps`, without their prefix."""
    left_out: list[str] = field(default_factory=list)
    """What does not fit and stays as it is, with `strict=False`."""
    notes: list[str] = field(default_factory=list)
    """What the user should know of a checkpoint that fits."""

    def rounds(self) -> Iterator[dict[str, int]]:
        """The `sources` in parts that have each position once: what is tied there may be apart here."""
        left = self.sources
        while left:
            one = {position: name for name, position in left.items()}
            yield {name: position for position, name in one.items()}
            left = {name: position for name, position in left.items() if one[position] != name}


def match_state(
    checkpoint: Source, optimizer: ZeroOptimizer, *, strict: bool, weights_only: bool = False
) -> Match:
    """Find each live parameter and group in the checkpoint; with `weights_only`, ignore groups and freezing.

    Raises `CheckpointError` for anything that is on one side only or of another shape or kind, if `strict`.
    """
    match, runtime, manifest = Match(), optimizer.runtime, checkpoint.manifest
    faults = _match_parameters(manifest.layout, runtime.layout, match, weights_only=weights_only)
    if not weights_only:
        faults += _match_groups(manifest.layout, runtime.layout, match)
        faults += _compare_streams(manifest, runtime, match)
        kinds = sorted({stream.kind for stream in manifest.streams if stream.kind.startswith(OUTER_PREFIX)})
        match.outer = [kind.removeprefix(OUTER_PREFIX) for kind in kinds]
        match.unwanted.update(kinds)  # among the optimizer's own states
        faults += _compare_own(manifest, optimizer, match)
    faults += _match_buffers(checkpoint.buffers, persistent_buffers(runtime.model), match)
    if faults and strict:
        needed = "the model that was" if weights_only else "the model and the optimizer that were"
        raise CheckpointError(
            f"{checkpoint.path}: the checkpoint does not fit: {'; '.join(faults)}. Build {needed} saved, or load what "
            "fits with strict=False"
        )
    match.left_out += faults
    return match


def _match_parameters(source: Layout, live: Layout, match: Match, *, weights_only: bool) -> list[str]:
    known: dict[str, tuple[int, Parameter]] = {}
    for position, parameter in enumerate(source.parameters):
        for name in (parameter.name, *parameter.aliases):
            known[name] = (position, parameter)
    missing, changed, refrozen, taken = [], [], [], set()
    for parameter in live.parameters:
        names = [name for name in (parameter.name, *parameter.aliases) if name in known]
        if not names:
            missing.append(parameter.name)
            continue
        position, saved = known[names[0]]
        taken.add(position)
        if saved.shape != parameter.shape:
            changed.append(f"{parameter.name} is {list(saved.shape)} there and {list(parameter.shape)} here")
            continue
        if not _convertible(saved.dtype, parameter.dtype):
            changed.append(f"{parameter.name} is {saved.dtype} there and {parameter.dtype} here")
            continue
        match.sources[parameter.name] = position
        # A frozen copy that was equal, such as a target network's, is stored as another name of the trained one.
        copied = names[0] in saved.aliases and not parameter.trainable
        if saved.trainable != parameter.trainable and not weights_only and not copied:
            there, here = ("trained", "frozen") if saved.trainable else ("frozen", "trained")
            refrozen.append(f"{parameter.name} is {there} there and {here} here")
    spare = [p.name for position, p in enumerate(source.parameters) if position not in taken]
    return [
        *_listed("missing in the checkpoint", missing),
        *_listed("not in the model", spare),
        *_listed("changed", changed),
        *_listed("trained on one side only, so that just the weights fit", refrozen),
    ]


def _match_buffers(
    saved: Mapping[str, tuple[str, tuple[int, ...]]], live: Mapping[str, Tensor], match: Match
) -> list[str]:
    strange = sorted(live.keys() ^ saved.keys())
    changed = []
    for name in sorted(live.keys() & saved.keys()):
        (dtype, shape), buffer = saved[name], live[name]
        own = dtype_name(buffer, f"buffer {name}"), tuple(buffer.shape)
        if shape != own[1]:
            changed.append(f"{name} is {list(shape)} there and {list(own[1])} here")
        elif not _convertible(dtype, own[0]):
            changed.append(f"{name} is {dtype} there and {own[0]} here")
        else:
            match.buffers.add(name)
    return [*_listed("buffers on one side only", strange), *_listed("buffers changed", changed)]


def _convertible(saved: str, live: str) -> bool:
    """Whether elements are converted from one dtype to another: between floating-point ones. Others must be equal."""
    return saved == live or all(
        dtype.startswith(("float", "bfloat")) and dtype not in PACKED for dtype in (saved, live)
    )


def _match_groups(source: Layout, live: Layout, match: Match) -> list[str]:
    line = list(source.parameters)
    pairs = {
        (parameter.group, line[match.sources[parameter.name]].group)
        for parameter in live.parameters
        if parameter.trainable and parameter.name in match.sources
        if line[match.sources[parameter.name]].trainable
    }
    ours, theirs = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    for here, there in sorted(pairs):
        if ours[here] == theirs[there] == 1:
            match.groups[here] = there
    if len(match.groups) == len(pairs):
        return []
    return [f"parameter groups have other members: {len(theirs)} there, {len(ours)} here"]


def _compare_streams(manifest: Manifest, runtime: Runtime, match: Match) -> list[str]:
    """What the optimizer keeps beside the master, compared with what was saved, once it had stepped at all."""
    others = (
        {MASTER, PARAM, RESIDUAL}
        if any(EMA in states.kinds for states in runtime.states)
        else {MASTER, PARAM, RESIDUAL, EMA}
    )
    saved = _kinds_at(
        stream
        for stream in manifest.streams
        if stream.kind not in others and not stream.kind.startswith(OUTER_PREFIX)
    )
    scalars = _kinds_at(manifest.scalars)
    if not saved and not scalars:
        return []
    expected = {number: _kinds(runtime, number) for number in range(len(runtime.inner.param_groups))}
    faults: dict[str, None] = {}
    stateless: list[str] = []
    for parameter in runtime.layout.parameters:
        source = match.sources.get(parameter.name)
        wanted = expected.get(parameter.group)
        if source is None or wanted is None or not parameter.trainable or not parameter.numel:
            continue
        there = saved.get(source, set()) | (scalars.get(source, set()) & wanted)
        if wanted and not there:  # it was frozen so far
            stateless.append(parameter.name)
        elif wanted != there:
            match.fresh.add(source)
            match.groups.pop(parameter.group, None)  # options of another optimizer
            faults[
                f"the optimizer ({type(runtime.inner).__name__}) keeps {_set(wanted)} for group {parameter.group}, the "
                f"checkpoint has {_set(there)}"
            ] = None
    match.notes += _listed("no optimizer states, which begin with the first step, of", stateless)
    return list(faults)


def _compare_own(manifest: Manifest, optimizer: ZeroOptimizer, match: Match) -> Iterator[str]:
    """States that zerokit keeps itself. Outer states that are not there begin anew."""
    saved, runtime = {stream.kind for stream in manifest.streams}, optimizer.runtime
    if optimizer.local_steps is not None:
        there, match.outer = set(match.outer), optimizer.local_steps.accepted(match.outer)
        if left := there.difference(match.outer):
            yield (
                f"it has {_set(left)} of another outer optimizer than that of LocalSteps here: build it with outer= "
                "as it was"
            )
    if not any(EMA in states.kinds for states in runtime.states):
        if optimizer.ema is not None and EMA not in saved:
            match.notes.append(
                "no average of the weights is in it: zerokit.Ema begins with the next update()"
            )
        elif optimizer.ema is None and EMA in saved:
            match.unwanted.add(EMA)
            yield "it has an average of the weights: make zerokit.Ema(optimizer, decay) before load()"
    if RESIDUAL in saved:
        match.unwanted.add(RESIDUAL)
        match.notes.append(
            f"its stream {RESIDUAL} is left out: an int8 or int4 wire keeps nothing of what it rounds away any more"
        )


def _kinds(runtime: Runtime, number: int) -> frozenset[str] | None:
    """The tensors that a group's options lead to; None where they cannot be tried out."""
    group = runtime.inner.param_groups[number]
    accepted = signature(type(runtime.inner)).parameters.values()  # AdamW has a default that it does not take
    names = {p.name for p in accepted} if all(p.kind != p.VAR_KEYWORD for p in accepted) else group.keys()
    options = {key: group[key] for key in names & runtime.inner.defaults.keys() - KERNEL_OPTIONS}
    dtype = next((m.tensor.dtype for _, m, _ in runtime.masters() if m.group == number), None)
    if dtype is None:
        return None
    try:
        states = probe(type(runtime.inner), options, dtype)
    except (UnsupportedOptimizer, TypeError, ValueError):
        return None
    return states.kinds | states.scalars


def _kinds_at(parts: Iterable[Stream | Scalars]) -> dict[int, set[str]]:
    """The kinds of these streams or scalars, by position in the line."""
    found: dict[int, set[str]] = {}
    for part in parts:
        for position in part.parameters:
            found.setdefault(position, set()).add(part.kind)
    return found


def _set(kinds: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(kinds)) or "nothing"


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{what}: {', '.join(names[:_NAMED])}{more}"]


class Shared:
    """State whose shape differs from its parameter's: each saved parameter's bytes or value, by kind."""

    def __init__(self, checkpoint: Source, match: Match, extra: Mapping[str, Any]) -> None:
        self._sources = {name: at for name, at in match.sources.items() if at not in match.fresh}
        self._averaged = {
            name for name, at in match.sources.items() if (EMA, at) in checkpoint.manifest.numbers
        }
        self._line = list(checkpoint.manifest.layout.parameters)
        self._rows: dict[str, dict[int, Tensor]] = {}
        self._values: Mapping[str, Mapping[str, Any]] = extra["values"]
        streams = checkpoint.manifest.streams
        self._streams = _kinds_at(stream for stream in streams if stream.kind not in WEIGHT_KINDS)
        """The kinds of state that have a parameter's shape, by position."""
        tensors = Tensors(checkpoint, tensor_of)
        for scalar in checkpoint.manifest.scalars:
            name = f"optimizer/{scalar.kind}"
            tensor = tensors.get(name, torch.empty(0))
            dtype, shape = dtype_name(tensor), tuple(tensor.shape)
            if (dtype, shape) != (scalar.dtype, (len(scalar.parameters), *scalar.shape)):
                raise CheckpointError(
                    f"{checkpoint.path}: {name} is {dtype}{list(shape)}, not as the manifest says"
                )
            self._rows[scalar.kind] = dict(zip(scalar.parameters, tensor, strict=True))

    def of(self, unit: UnitState, position: int) -> dict[str, Any]:
        source = self._sources.get(unit.unit.parameters[position].name)
        if source is None:
            return {}
        name = self._line[source].name
        rows = {kind: rows[source] for kind, rows in self._rows.items() if source in rows}
        return rows | {kind: values[name] for kind, values in self._values.items() if name in values}

    def kinds(self, unit: UnitState, position: int) -> set[str]:
        """The saved kinds of state that have the shape of this parameter of a unit."""
        source = self._sources.get(unit.unit.parameters[position].name)
        return set() if source is None else self._streams.get(source, set())

    def key(self, unit: UnitState, position: int) -> str:
        """A key that is equal for parameters that may share a master."""
        values = {
            kind: bytes(host_bytes(value)) if isinstance(value, Tensor) else value
            for kind, value in self.of(unit, position).items()
        }
        averaged = unit.unit.parameters[position].name in self._averaged
        return repr((averaged, sorted(self.kinds(unit, position)), sorted(values.items())))

    def apply(self, runtime: Runtime, unit: UnitState, master: Master) -> None:
        """Set a master's state to the value saved for its parameters, which is equal for all of them."""
        inner = runtime.inner
        group = inner.param_groups[master.group]
        # A piece that is all padding belongs to no parameter: it takes the count of any in the unit.
        fitting = unit.positions_in(master) or [
            index for index, p in enumerate(unit.unit.parameters) if p.group == master.group
        ]
        kinds = NOT_THE_OPTIMIZERS | self.kinds(unit, fitting[0])
        state = {k: value for k, value in inner.state.pop(master.tensor, {}).items() if k in kinds}
        if EMA in state and unit.unit.parameters[fitting[0]].name not in self._averaged:
            state[EMA].copy_(master.tensor.detach())  # an average begins with the weights
        for kind, value in self.of(unit, fitting[0]).items():
            if kind not in self._rows:
                state[kind] = value
                continue
            # As torch's own load_state_dict: fused kernels want the count beside the parameter, others on the host.
            beside = kind != "step" or group.get("fused") or group.get("capturable")
            state[kind] = value.to(master.tensor.device if beside else "cpu", copy=True)
        if state:
            inner.state[master.tensor] = state
