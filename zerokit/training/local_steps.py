"""`LocalSteps`: islands train by themselves, and synchronise their weights once in many steps.

Local SGD (arXiv:1805.09767), DiLoCo (arXiv:2311.08105) and Streaming DiLoCo (arXiv:2501.18512), with everything that
they keep between synchronisations cut over all ranks.
"""

from __future__ import annotations

import functools
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.errors import LayoutMismatch, ScheduleError, UsageError
from zerokit.formulas import BLOCK_FORMATS, MemoryReport, Operation, TrafficReport
from zerokit.layout import Interval
from zerokit.runtime.admission import OptimizerStates, probe
from zerokit.runtime.islands import Islands
from zerokit.runtime.optimizer import ZeroOptimizer
from zerokit.runtime.precision import BlockName
from zerokit.training.differences import KNOWN, LOST, Differences
from zerokit.training.exchange import Exchange, Synchronisation
from zerokit.training.fragments import Fragment, Region, divide
from zerokit.training.masters import Masters

OuterOptimizer = Callable[[list[nn.Parameter]], Optimizer]
DILOCO: OuterOptimizer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)

ANCHOR = "anchor"
_SHARE_OF_TIME = 0.97
"""Messages take this share of the time until a result is due: steps are not all as long as the last ones."""
_FP32 = 4


@dataclass(slots=True)
class _Pending:
    """A fragment in flight, due after the step `due` of the training."""

    part: _Part
    due: int
    work: Synchronisation | None
    """None where its result came from a checkpoint: `buffer` has it."""
    buffer: Tensor


@dataclass(slots=True)
class _Part:
    """A fragment on this rank. `anchor` [piece_numel]: the weights that all islands last agreed on, of this piece.

    `differences` are kept where it crosses on a narrow wire.
    """

    fragment: Fragment
    region: Region
    anchor: nn.Parameter | None
    differences: Differences | None = None


class LocalSteps:
    """Lets islands of ranks make `every` steps by themselves, and then brings their weights together.

    The islands are the inner axis of the optimizer's mesh, and train at any stage. Between synchronisations nothing
    crosses the outer axis; norms, clipping, overflow and the loss scale belong to each island. `optimizer.step()`
    counts the steps and does the rest:

        optimizer = ZeroOptimizer(model, torch.optim.AdamW, mesh=(2, 8), stage=("local", 3))  # 2 islands of 8 ranks
        local = zerokit.LocalSteps(optimizer, every=50)
        ...                      # the loop stays as it is
        local.synchronize()      # after the last step: all islands have equal weights

    At a synchronisation the mean of the islands' weights is taken, the outer optimizer steps with (weights at the last
    synchronisation − mean) as its gradient, and every island goes on from the result. A rank holds this anchor and the
    outer optimizer's states for what it owns alone: 8Ψ/N bytes with momentum. With `blend=1` and `delay=0` all islands
    have bitwise-equal parameters afterwards. The optimizer's own states and the model's buffers stay those of each
    island. On construction every island takes island 0's parameters and buffers.

    Args:
        optimizer: built with `mesh=(islands, ranks of an island)` and `stage=("local", stage)`.
        every: steps between two synchronisations of the same parameter; called H in the papers.
        outer: makes the outer optimizer, which must be elementwise, from a list of parameters, such as
            `functools.partial(torch.optim.SGD, lr=1.0)`. None takes the mean of the weights as it is (local SGD).
        fragments: parts of the model that are synchronised in turn, each once in `every` steps.
        delay: steps that a fragment is in flight while training goes on, under `every`. Its messages are spread over
            them, until the next fragment's turn at most: `delay=every / fragments`, rounded up, keeps the link evenly
            busy.
        blend: how far weights move to the result, from over 0 to 1 for all the way; what an island has learned while
            the fragment was in flight is lost by 1. arXiv:2501.18512 uses 0.5.
        wire: "int8" or "int4": weights cross as rounded differences from what all islands know, in a quarter or an
            eighth of the bytes. What rounding takes away comes with the next synchronisation. Every rank keeps
            8 bytes more of each element of its shards.

    Raises:
        UsageError: for arguments that do not exist or fit together, and for an optimizer without islands.
        UnsupportedOptimizer: for an outer optimizer that is not elementwise.
        LayoutMismatch: where islands disagree about the model or the settings.
    """

    def __init__(
        self,
        optimizer: ZeroOptimizer,
        *,
        every: int,
        outer: OuterOptimizer | None = DILOCO,
        fragments: int = 1,
        delay: int = 0,
        blend: float = 1.0,
        wire: BlockName | None = None,
    ) -> None:
        islands = _islands_of(optimizer)
        _check(every, outer, fragments, delay, blend, wire)
        self._form = None if wire is None else BLOCK_FORMATS[wire]
        self.every, self.fragments, self.delay, self.blend = every, fragments, delay, float(blend)
        self.steps = 0
        """Calls of `optimizer.step()` so far; those that overflowed in fp16 count."""
        self._masters = Masters(optimizer)
        try:
            parts = divide(optimizer.layout, fragments, every)
        except ValueError:
            units = sum(unit.trainable for unit in optimizer.layout.units)
            raise UsageError(
                f"fragments={fragments}: the model has {units} units with trainable parameters, and a fragment is at "
                f"least one: pass at most {units}, or a smaller bucket_mb= or other units= to ZeroOptimizer"
            ) from None
        self._exchange = Exchange(islands)
        self._saves = Exchange(islands)
        """Apart, for saves beside the training."""
        self._settings = {
            **self._masters.describe(),
            "every": str(every),
            "fragments": str(fragments),
            "delay": str(delay),
            "blend": str(self.blend),
            "wire": str(wire),
        }
        kept = outer is not None or delay > 0 or wire is not None
        self._parts = [self._make_part(fragment, kept=kept) for fragment in parts]
        anchors = [part.anchor for part in self._parts if part.anchor is not None]
        self.outer = None if outer is None else _build_outer(outer, anchors)
        """The outer optimizer; its `param_groups` may be scheduled. None where the mean is taken as it is."""
        self._states = None if outer is None or self.outer is None else _states_of(outer, self.outer)
        if self.outer is not None:
            options = {key: value for key, value in self.outer.param_groups[0].items() if key != "params"}
            self._settings["outer"] = f"{type(self.outer).__name__} {options}"
        self._require_agreement()
        self._take_over_island_0()
        self._pending: deque[_Pending] = deque()
        self._times: deque[float] = deque(maxlen=every)
        self._last_step_at: float | None = None
        self._last: dict[int, TrafficReport] = {}
        optimizer.local_steps = self
        self._optimizer = weakref.ref(optimizer)  # which holds this object

    def _make_part(self, fragment: Fragment, *, kept: bool) -> _Part:
        region = Region(fragment, self._masters.rank, self._exchange.count)
        part = _Part(fragment, region, nn.Parameter(torch.zeros(region.piece_numel)) if kept else None)
        if self._form is not None:
            part.differences = Differences(self._form, self._exchange.count, region.piece_numel)
        return part

    @property
    def islands(self) -> int:
        """How many there are."""
        return self._exchange.count

    @property
    def island(self) -> int:
        """The one of this rank."""
        return self._exchange.index

    @property
    def waited_s(self) -> float:
        """Seconds that training has waited for other islands so far."""
        return self._exchange.waited_s

    # ---- the training

    def after_step(self) -> None:
        """A step is over; `ZeroOptimizer.step` calls this. Raises `ScheduleError` where an island did not come."""
        self.steps += 1
        now = time.monotonic()
        if self._last_step_at is not None:
            self._times.append(now - self._last_step_at)
        begun = [part for part in self._parts if self.steps % self.every == part.fragment.offset % self.every]
        due = [one for one in self._pending if one.due <= self.steps]
        if begun or due:
            self._masters.settle()
        for one in due:
            self._apply(one)
        for part in begun:
            self._begin(part)
        self._last_step_at = time.monotonic()

    def synchronize(self) -> None:
        """Take in what is in flight, and then synchronise every fragment, so that all islands have equal weights.

        All ranks of all islands call it at the same step, at the end of the training say. It does not move the
        position in the round.
        """
        self._masters.settle()
        while self._pending:
            self._apply(self._pending[0])
        for part in self._parts:
            self._apply(self._start(part, due=self.steps, seconds=None), weight=1.0)
        self._last_step_at = None

    def _begin(self, part: _Part) -> None:
        if not self.delay:
            self._apply(self._start(part, due=self.steps, seconds=None))
            return
        offsets = [other.fragment.offset for other in self._parts if other is not part]
        turn = min([self.delay, *((offset - part.fragment.offset) % self.every for offset in offsets)])
        step_s = statistics.median(self._times) if self._times else 0.0
        self._start(part, due=self.steps + self.delay, seconds=_SHARE_OF_TIME * turn * step_s)

    def _start(self, part: _Part, *, due: int, seconds: float | None) -> _Pending:
        buffer = self._region_of_masters(part)
        name = f"synchronisation of fragment {part.fragment.index} after step {self.steps}"
        update = functools.partial(self._update, part)
        work = Synchronisation(name, buffer, update, seconds, part.differences)
        pending = _Pending(part, due, work, buffer)
        self._pending.append(pending)
        self._exchange.start(work)
        return pending

    def _region_of_masters(self, part: _Part) -> Tensor:
        buffer = torch.zeros(part.region.numel)
        for unit, place in part.region.shards():
            self._masters.read(unit.index, buffer[place.start : place.stop])
        return buffer

    @torch.no_grad()
    def _update(self, part: _Part, mean: Tensor) -> None:
        """The outer step, on this rank's piece; in the thread of the exchange where there is one."""
        if part.anchor is None:
            return
        if part.differences is not None:
            mean += part.anchor  # it is the mean movement
        if self.outer is None:
            part.anchor.copy_(mean)
            return
        part.anchor.grad = part.anchor.detach() - mean
        self.outer.step()  # the other fragments have no gradients
        part.anchor.grad = None
        mean.copy_(part.anchor)

    def _apply(self, one: _Pending, weight: float | None = None) -> None:
        """Wait for a fragment and take it in, on all ranks of the island or on none."""
        error: Exception | None = None
        try:
            if one.work is not None:
                self._exchange.finish(one.work)
        except Exception as failure:
            error = failure
        failed = self._masters.any(error is not None)
        self._pending.remove(one)
        if error is not None:
            raise error
        if failed:
            raise ScheduleError(
                f"another rank of island {self.island} did not get through the synchronisation of fragment "
                f"{one.part.fragment.index}, whose result no rank of this island has taken over: see its error"
            )
        shards = {
            unit.index: one.buffer[place.start : place.stop] for unit, place in one.part.region.shards()
        }
        self._masters.mix(shards, self.blend if weight is None else weight)
        self._count(one.part)

    # ---- reports

    def memory(self) -> MemoryReport:
        """Bytes that a rank holds for this now: anchor and outer states under `optimizer`, fragments in flight under
        `buckets`.
        """
        lines = dict.fromkeys((field.name for field in fields(MemoryReport)), 0)
        for part in self._parts:
            for tensor in self._owned(part).values():
                _add(lines, "optimizer", self._payload(part), tensor)
            if part.differences is not None:
                payload = part.region.payload(Interval(0, part.region.numel))
                _add(lines, "optimizer", payload, part.differences.known)
                _add(lines, "residual", payload, part.differences.lost)
            if self.outer is not None and part.anchor is not None:
                state = self.outer.state.get(part.anchor, {})
                others = (v for v in state.values() if isinstance(v, Tensor) and v.shape != part.anchor.shape)
                lines["scalars"] += sum(value.untyped_storage().nbytes() for value in others)
        lines["buckets"] = sum(one.buffer.nbytes for one in self._pending)
        return MemoryReport(**lines)

    def predicted_memory(self) -> MemoryReport:
        """What `memory()` must be after the first round, from the layout and the schedule alone."""
        kept = [part for part in self._parts if part.anchor is not None]
        states = self._states
        element = _FP32 + (0 if states is None else states.element_bytes)
        payload = sum(self._payload(part) for part in kept)
        padded = sum(part.region.piece_numel for part in kept)
        regions = [part.region for part in kept if self._form is not None]
        known = _FP32 * sum(region.payload(Interval(0, region.numel)) for region in regions)
        return MemoryReport(
            optimizer=payload * element + known,
            residual=known,
            padding=(padded - payload) * element + 2 * (_FP32 * sum(r.numel for r in regions) - known),
            scalars=0 if states is None else len(kept) * states.scalar_bytes,
            buckets=sum(part.region.numel * _FP32 for part in self._parts if self._in_flight(part)),
        )

    def traffic(self) -> TrafficReport:
        """What the last synchronisation of each fragment moved, summed over all ranks of all islands: a round of it."""
        return _total(self._last.values())

    def predicted_traffic(self) -> TrafficReport:
        """What a round must move, from the layout alone; `by_operation` of `traffic()` equals it."""
        return _total(
            TrafficReport(
                self._across(part)
                | _scaled(self._masters.predicted_exchange(part.fragment.units), self.islands)
            )
            for part in self._parts
        )

    def _count(self, part: _Part) -> None:
        inner = self._masters.exchanged()
        exchange = self._exchange
        calls, bytes_ = exchange.take_control()
        self._last[part.fragment.index] = TrafficReport(
            self._across(part) | _scaled(inner.by_operation, self.islands),
            2 * (self.islands - 1) * self._nbytes(part.region.piece_numel) + inner.received_bytes,
            bytes_ + inner.control_bytes,
            calls + inner.control_calls,
        )

    def _across(self, part: _Part) -> dict[str, Operation]:
        elements, nbytes = part.fragment.payload_numel, part.fragment.payload_numel * _FP32
        if self._form is not None:  # with the scales of each rank's blocks
            scales = (
                self._form.nbytes(part.region.piece_numel) - part.region.piece_numel * self._form.bits // 8
            )
            nbytes = -(-elements * self._form.bits // 8) + self.islands * self._masters.layout.world * scales
        one = Operation(1, (self.islands - 1) * elements, (self.islands - 1) * nbytes)
        return {"reduce_scatter/outer": one, "all_gather/outer": one}

    def _nbytes(self, numel: int) -> int:
        return numel * _FP32 if self._form is None else self._form.nbytes(numel)

    def _payload(self, part: _Part) -> int:
        return part.region.payload(part.region.piece(self.island))

    def _in_flight(self, part: _Part) -> bool:
        since = (self.steps - part.fragment.offset) % self.every
        return since < self.delay and self.steps >= part.fragment.offset

    # ---- the state

    def _owned(self, part: _Part) -> dict[str, Tensor]:
        """The tensors of a piece's shape that this rank keeps for a fragment, by name."""
        if part.anchor is None:
            return {}
        state = {} if self.outer is None else self.outer.state.get(part.anchor, {})
        return {ANCHOR: part.anchor.detach()} | {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == part.anchor.shape
        }

    def _arrive(self) -> None:
        """Wait for what is in flight, without taking it in: it is still due when it was."""
        for one in self._pending:
            if one.work is not None:
                self._exchange.finish(one.work)
                one.work = None

    def streams(self) -> dict[str, dict[int, Tensor]]:
        """Anchor and outer states, by name and unit, each this rank's shard of the unit. All ranks of all islands call.

        Every island gets all of them, so that each island's checkpoint is whole: 8Ψ bytes cross the outer axis.
        """
        self._arrive()
        found: dict[str, dict[int, Tensor]] = {}
        for part in self._parts:
            for name, piece in self._owned(part).items():
                region = torch.zeros(part.region.numel, dtype=piece.dtype)
                own = part.region.piece(self.island)
                region[own.start : own.stop] = piece
                self._exchange.gather(f"save after step {self.steps}", region)
                self._add_shards(found, name, part, region)
            if part.differences is not None:
                lost = part.differences.lost.view(-1)
                self._exchange.sum(f"save after step {self.steps}", lost)
                whole = lost.clone()
                self._exchange.gather(f"save after step {self.steps}", whole)
                self._add_shards(found, LOST, part, whole)
                self._add_shards(found, KNOWN, part, part.differences.known.view(-1).clone())
        return found

    def _add_shards(
        self, found: dict[str, dict[int, Tensor]], name: str, part: _Part, region: Tensor
    ) -> None:
        for unit, place in part.region.shards():
            found.setdefault(name, {})[unit.index] = region[place.start : place.stop]

    def plain_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside `streams`: the position in the round, options, states that are no arrays."""
        groups = [] if self.outer is None else self.outer.param_groups
        return {
            "steps": self.steps,
            "pending": [[one.part.fragment.index, one.due - self.steps] for one in self._pending],
            "fragments": self._fragment_names(),
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
            "scalars": [
                {
                    name: value.clone() if isinstance(value, Tensor) else value
                    for name, value in self._outer_state(part).items()
                    if name not in self._owned(part)
                }
                for part in self._parts
            ],
        }

    def expect(self, names: Iterable[str]) -> dict[str, dict[int, Tensor]]:
        """Room for the streams of these names that a checkpoint has, to be filled and given to `restore`."""
        return {
            name: {
                unit.index: torch.zeros(unit.shard_numel)
                for part in self._parts
                for unit in part.fragment.units
            }
            for name in names
        }

    def restore(self, streams: Mapping[str, Mapping[int, Tensor]], plain: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint's state; from one without it, begin the first round with the weights of now.

        Raises `UsageError` for a checkpoint with a fragment in flight where fragments are others here.
        """
        if plain is not None and plain["pending"] and plain["fragments"] != self._fragment_names():
            raise UsageError(
                f"the checkpoint was saved while a fragment was in flight, and has {len(plain['fragments'])} fragments "
                f"of other units than the {len(self._parts)} here: build LocalSteps and ZeroOptimizer with the "
                "fragments, units and bucket_mb that were saved, or save after synchronize()"
            )
        if self._form is None and any(shard.any() for shard in streams.get(LOST, {}).values()):
            raise UsageError(
                "the checkpoint holds what a narrow wire between islands has rounded away, which would be lost here: "
                "build LocalSteps with wire='int8' or 'int4', or save without it"
            )
        self._forget()
        regions: dict[int, Tensor] = {}
        for part in self._parts:
            if part.anchor is None:
                continue
            filled = {name: self._region_of(part, shards) for name, shards in streams.items()}
            region = filled.pop(ANCHOR, None)
            if region is None:
                region = self._region_of_masters(part)
            known, lost = filled.pop(KNOWN, None), filled.pop(LOST, None)
            regions[part.fragment.index] = region
            own = part.region.piece(self.island)
            if part.differences is not None:
                if known is None:  # islands may differ in what they have loaded
                    known = region.clone()
                    self._exchange.gather("load", known)
                regions[part.fragment.index] = known.clone()
                part.differences.known.view(-1).copy_(known)
                part.differences.lost.zero_()
                if lost is not None:
                    part.differences.lost[self.island] = lost[own.start : own.stop]
            with torch.no_grad():
                part.anchor.copy_(region[own.start : own.stop])
            if self.outer is not None and filled:
                self.outer.state[part.anchor] = {
                    name: state[own.start : own.stop].clone() for name, state in filled.items()
                }
        if plain is None:
            return
        self.steps = plain["steps"]
        if self.outer is not None:
            for group, saved in zip(self.outer.param_groups, plain["groups"], strict=False):
                group.update(saved)
            if plain["fragments"] == self._fragment_names():
                for part, scalars in zip(self._parts, plain["scalars"], strict=True):
                    if part.anchor is not None and scalars:
                        self.outer.state[part.anchor].update(scalars)
        for index, left in plain["pending"]:
            part = self._parts[index]
            self._pending.append(_Pending(part, self.steps + left, None, regions[index]))

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: only the same rank of an equal run can load it."""
        self._arrive()
        return {
            "steps": self.steps,
            "anchors": [None if part.anchor is None else part.anchor.detach() for part in self._parts],
            "differences": [
                None if part.differences is None else (part.differences.known, part.differences.lost)
                for part in self._parts
            ],
            "outer": None if self.outer is None else self.outer.state_dict(),
            "pending": [(one.part.fragment.index, one.due, one.buffer) for one in self._pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._forget()
        self.steps = state["steps"]
        with torch.no_grad():
            for part, anchor in zip(self._parts, state["anchors"], strict=True):
                if part.anchor is not None:
                    part.anchor.copy_(anchor)
        for part, saved in zip(self._parts, state["differences"], strict=True):
            if part.differences is not None:
                part.differences.known.copy_(saved[0])
                part.differences.lost.copy_(saved[1])
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])
        for index, due, buffer in state["pending"]:
            self._pending.append(_Pending(self._parts[index], due, None, buffer.clone()))

    def committed(self, step: int) -> None:
        """Return when the save of `step` is complete on every island. Called by one rank of each."""
        self._saves.all(f"save of step {step}", step)

    def agree_on_step(self, steps: set[int]) -> int | None:
        """The greatest of `steps` that every island has; None where there is none."""
        common = set.intersection(*(set(other) for other in self._exchange.all("load", sorted(steps))))  # type: ignore[call-overload]
        return max(common, default=None)

    def _forget(self) -> None:
        self._arrive()
        self._pending.clear()
        self._last.clear()
        self._times.clear()
        self._last_step_at = None
        self.steps = 0
        if self.outer is not None:
            self.outer.state.clear()

    def _outer_state(self, part: _Part) -> dict[str, Any]:
        if self.outer is None or part.anchor is None:
            return {}
        state: dict[str, Any] = self.outer.state.get(part.anchor, {})
        return state

    def _region_of(self, part: _Part, shards: Mapping[int, Tensor]) -> Tensor:
        region = torch.zeros(part.region.numel)
        for unit, place in part.region.shards():
            region[place.start : place.stop] = shards[unit.index]
        return region

    def _fragment_names(self) -> list[list[str]]:
        return [[unit.name for unit in part.fragment.units] for part in self._parts]

    # ---- the start

    def _require_agreement(self) -> None:
        every = self._exchange.all("construction of LocalSteps", self._settings)
        for index, other in enumerate(every):
            assert isinstance(other, dict)
            different = [
                f"{key} is {other.get(key)}, not {value}"
                for key, value in self._settings.items()
                if other.get(key) != value
            ]
            if different:
                raise LayoutMismatch(
                    f"island {index} and island {self.island} cannot be synchronised: on island {index} "
                    f"{'; '.join(different)}: pass the same model and the same settings on all islands"
                )

    def _take_over_island_0(self) -> None:
        name = "start of LocalSteps"
        self._masters.settle()
        for part in self._parts:
            buffer = self._region_of_masters(part)
            self._exchange.broadcast(name, buffer)
            self._masters.mix(
                {unit.index: buffer[place.start : place.stop] for unit, place in part.region.shards()}, 1.0
            )
            if part.anchor is not None:
                own = part.region.piece(self.island)
                with torch.no_grad():
                    part.anchor.copy_(buffer[own.start : own.stop])
            if part.differences is not None:
                part.differences.known.view(-1).copy_(buffer)
        with torch.no_grad():
            for tensor in [*self._masters.frozen().values(), *self._masters.model.buffers()]:
                self._exchange.broadcast(name, tensor)
        self._masters.refresh_frozen()
        self._masters.exchanged()


def _islands_of(optimizer: ZeroOptimizer) -> Islands:
    if not isinstance(optimizer, ZeroOptimizer):
        raise UsageError(
            f"the first argument is a {type(optimizer).__name__}: pass the ZeroOptimizer, "
            "zerokit.LocalSteps(optimizer, every=50)"
        )
    if optimizer.islands is None:
        raise UsageError(
            "this optimizer sums gradients over all its ranks in every step, so it has no islands: build it with "
            'mesh=(islands, ranks of an island) and stage=("local", stage), such as '
            'ZeroOptimizer(model, torch.optim.AdamW, mesh=(2, 8), stage=("local", 3))'
        )
    if optimizer.local_steps is not None:
        raise UsageError("this optimizer makes local steps already: use optimizer.local_steps")
    return optimizer.islands


def _check(
    every: object, outer: object, fragments: object, delay: object, blend: object, wire: object
) -> None:
    if type(every) is not int or every < 1:
        raise UsageError(
            f"every={every!r}: expected the number of steps between synchronisations, at least 1"
        )
    if outer is not None and not callable(outer):
        raise UsageError(
            f"outer={outer!r}: expected a function that makes a torch optimizer from a list of parameters, such as "
            "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), or None for the plain mean"
        )
    if type(fragments) is not int or fragments < 1:
        raise UsageError(f"fragments={fragments!r}: expected a number of parts of the model, at least 1")
    if fragments > every:
        raise UsageError(
            f"fragments={fragments} with every={every}: each fragment has its turn in {every} steps: pass at most "
            f"{every}"
        )
    if type(delay) is not int or not 0 <= delay < every:
        raise UsageError(
            f"delay={delay!r}: expected a number of steps from 0 to {every - 1}: a fragment must arrive before its "
            f"next synchronisation, {every} steps later"
        )
    if not isinstance(blend, int | float) or isinstance(blend, bool) or not 0.0 < blend <= 1.0:
        raise UsageError(f"blend={blend!r}: expected a number over 0, and at most 1 for the result alone")
    if wire is not None and wire not in BLOCK_FORMATS:
        raise UsageError(f"wire={wire!r}: expected 'int8' or 'int4', or None for weights in fp32")


def _build_outer(make: OuterOptimizer, anchors: list[nn.Parameter]) -> Optimizer:
    outer = make(anchors)
    if not isinstance(outer, Optimizer):
        raise UsageError(
            f"outer made a {type(outer).__name__}: expected a torch optimizer over the parameters that it is given"
        )
    return outer


def _states_of(make: OuterOptimizer, outer: Optimizer) -> OptimizerStates:
    """What the outer optimizer keeps. Raises `UnsupportedOptimizer` where it is not elementwise."""

    def named(parameters: list[nn.Parameter]) -> Optimizer:
        return make(parameters)

    named.__name__ = type(outer).__name__
    return probe(named, {}, torch.float32)  # type: ignore[arg-type]  # called like a class


def _add(lines: dict[str, int], line: str, payload: int, tensor: Tensor) -> None:
    lines[line] += payload * tensor.element_size()
    lines["padding"] += (tensor.numel() - payload) * tensor.element_size()


def _scaled(operations: Mapping[str, Operation], islands: int) -> dict[str, Operation]:
    """What every island does inside itself, summed over them; what moves nothing is left out."""
    return {
        f"{name}/inner": Operation(one.calls, one.elements * islands, one.bytes * islands)
        for name, one in operations.items()
        if one.elements
    }


def _total(reports: Iterable[TrafficReport]) -> TrafficReport:
    operations: dict[str, Operation] = {}
    received = control = calls = 0
    for report in reports:
        received += report.received_bytes
        control += report.control_bytes
        calls += report.control_calls
        for name, one in report.by_operation.items():
            before = operations.get(name, Operation(0, 0, 0))
            operations[name] = Operation(
                before.calls + one.calls, before.elements + one.elements, before.bytes + one.bytes
            )
    return TrafficReport(operations, received, control, calls)
