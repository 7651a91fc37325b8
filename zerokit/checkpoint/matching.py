"""Matches a checkpoint to a live model and optimizer, by name: parameters, streams, groups and shared states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerokit.checkpoint.entries import Uncut
from zerokit.checkpoint.expected import expected_kinds, rows_here
from zerokit.checkpoint.manifest import WEIGHT_KINDS, Manifest, Scalars
from zerokit.checkpoint.safetensors import Stream
from zerokit.checkpoint.small_floats import PACKED
from zerokit.checkpoint.snapshot import persistent_buffers
from zerokit.checkpoint.source import Source, Tensors
from zerokit.checkpoint.state import MASTER, OUTER_PREFIX, PARAM, dtype_name, host_bytes, tensor_of
from zerokit.checkpoint.uncut import read_uncut
from zerokit.errors import CheckpointError
from zerokit.layout import Layout, Parameter
from zerokit.runtime import ZeroOptimizer
from zerokit.runtime.build import Runtime
from zerokit.runtime.masters import Master, WholeMaster
from zerokit.runtime.states import EMA
from zerokit.runtime.unit import UnitState

NOT_THE_OPTIMIZERS = frozenset({EMA})
"""States of a master that zerokit keeps itself."""
RESIDUAL = "wire_residual"
"""A stream of earlier versions: what an int8 or int4 wire had rounded away of gradients, to be added to later ones."""
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
        if stream.block == 1 and stream.kind not in others and not stream.kind.startswith(OUTER_PREFIX)
    )
    scalars, uncut = _kinds_at(manifest.scalars), _kinds_at(manifest.uncut)
    if not saved and not scalars and not uncut:
        return []
    rows: dict[int, set[tuple[int, int]]] = {}
    for place in manifest.uncut:
        rows.setdefault(place.position, set()).add(place.rows)
    faults: dict[str, None] = {}
    stateless: list[str] = []
    for name, expected in expected_kinds(runtime).items():
        source = match.sources.get(name)
        if source is None:
            continue
        there = saved.get(source, set()) | uncut.get(source, set())
        # Elementwise classes may find a count that they do not keep.
        counts = scalars.get(source, set())
        there |= counts if expected.tensors else counts & expected.most
        if expected.most and not there:  # it was frozen so far
            stateless.append(name)
        elif not expected.fits(there):
            match.fresh.add(source)
            match.groups.pop(expected.group, None)  # options of another optimizer
            kept = expected.most if expected.tensors else expected.least
            faults[
                f"the optimizer ({expected.name}) keeps {_set(kept)} for group {expected.group}, the "
                f"checkpoint has {_set(there)}"
            ] = None
        elif not rows.get(source, set()) <= {*rows_here(runtime, expected)}:
            match.fresh.add(source)
            faults[
                f"{name} has states of {_set(uncut[source])} for other blocks of rows ({_spans(rows[source])} there, "
                f"{_spans({*rows_here(runtime, expected)})} here): pass row_blocks= as it was"
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


def _kinds_at(parts: Iterable[Stream | Scalars | Uncut]) -> dict[int, set[str]]:
    """The kinds of these streams, scalars or files, by position in the line."""
    found: dict[int, set[str]] = {}
    for part in parts:
        if isinstance(part, Uncut):
            found.setdefault(part.position, set()).update(part.kinds)
        else:
            for position in part.parameters:
                found.setdefault(position, set()).add(part.kind)
    return found


def _arranged(tensor: Tensor, order: list[int]) -> Tensor:
    """The same tensor with its dimensions in this order in memory, the slowest first."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(inverse)


def _spans(rows: set[tuple[int, int]]) -> str:
    return ", ".join(f"{start} to {stop}" for start, stop in sorted(rows)[:_NAMED])


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
        self._place = checkpoint.place
        self._uncut = {(one.position, *one.rows): one for one in checkpoint.manifest.uncut}
        self._rows: dict[str, dict[int, Tensor]] = {}
        self._values: Mapping[str, Mapping[str, Any]] = extra["values"]
        streams = checkpoint.manifest.streams
        self._streams = _kinds_at(s for s in streams if s.block == 1 and s.kind not in WEIGHT_KINDS)
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

    def files(self, runtime: Runtime) -> list[str]:
        """The names of the files with states of this rank's tensors that are updated whole."""
        places = (self._file(runtime, unit, master) for unit, master, _ in runtime.masters())
        return [place.name for place in places if place is not None]

    def _file(self, runtime: Runtime, unit: UnitState, master: Master) -> Uncut | None:
        if not isinstance(master, WholeMaster):
            return None
        source = self._sources.get(unit.unit.parameters[master.whole.position].name, -1)
        return self._uncut.get((source, *runtime.owners.rows(master.whole)))

    def uncut(self, runtime: Runtime, unit: UnitState, master: Master) -> dict[str, Any]:
        """The states of a tensor that is updated whole that are in a file of their own."""
        place, device = self._file(runtime, unit, master), master.tensor.device

        def make(content: bytearray, dtype: str, shape: tuple[int, ...]) -> Tensor:
            return tensor_of(content, dtype, shape).to(device)

        return {} if place is None else read_uncut(self._place(place.name), place, make, _arranged)

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
        state |= self.uncut(runtime, unit, master)
        if state:
            inner.state[master.tensor] = state
