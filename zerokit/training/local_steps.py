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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerokit.errors import ScheduleError, UsageError
from zerokit.formulas import MemoryReport, TrafficReport
from zerokit.runtime.optimizer import ZeroOptimizer
from zerokit.runtime.precision import BlockName
from zerokit.sizes import BLOCK_FORMATS
from zerokit.training.arguments import check_arguments, require_islands
from zerokit.training.differences import KNOWN, LOST
from zerokit.training.exchange import Exchange, Synchronisation
from zerokit.training.fragments import Part, divide
from zerokit.training.masters import Masters
from zerokit.training.outer import ANCHOR, KEPT_APART, Outer, OuterOptimizer
from zerokit.training.round_traffic import predict_traffic, take_traffic, total

_T = TypeVar("_T")

DILOCO: OuterOptimizer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)

_SHARE_OF_TIME = 0.97
"""Messages take this share of the time until a result is due: steps are not all as long as the last ones."""


@dataclass(slots=True)
class _Pending:
    """A fragment in flight, due after the step `due` of the training."""

    part: Part
    due: int
    work: Synchronisation | None
    """None where its result came from a checkpoint: `buffer` has it."""
    buffer: Tensor


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
        islands = require_islands(optimizer)
        check_arguments(every, outer, fragments, delay, blend, wire)
        form = None if wire is None else BLOCK_FORMATS[wire]
        self.every, self.fragments, self.delay, self.blend = every, fragments, delay, float(blend)
        self.steps = 0
        """Calls of `optimizer.step()` so far; those that were left out count."""
        self._masters = Masters(optimizer)
        self._exchange = Exchange(islands)
        self._saves = Exchange(islands)  # apart, for saves beside the training
        kept = outer is not None or delay > 0 or wire is not None
        where = self._masters.rank, islands.count, islands.index
        self._parts = [
            Part(fragment, *where, form, kept=kept) for fragment in divide(optimizer.layout, fragments, every)
        ]
        self._outer = Outer(self._parts, outer)
        self._exchange.require_equal(
            "construction of LocalSteps",
            {
                **self._masters.describe(),
                "every": str(every),
                "fragments": str(fragments),
                "delay": str(delay),
                "blend": str(self.blend),
                "wire": str(wire),
                "outer": str(self._outer.describe()),
            },
        )
        self._take_over_island_0()
        self._pending: deque[_Pending] = deque()
        self._moved: dict[int, TrafficReport] = {}
        """By the last synchronisation of each fragment."""
        self._times: deque[float] = deque(maxlen=every)
        self._last_step_at: float | None = None
        optimizer.local_steps = self
        self._optimizer = weakref.ref(optimizer)  # which holds this object

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer; its `param_groups` may be scheduled. None where the mean is taken as it is."""
        return self._outer.optimizer

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
        optimizer = self._optimizer()
        if optimizer is None:
            raise UsageError("the optimizer of these local steps is gone: keep it as long as its LocalSteps")
        optimizer.require_own_weights("synchronize()")
        self._masters.settle()
        while self._pending:
            self._apply(self._pending[0])
        for part in self._parts:
            self._apply(self._start(part, due=self.steps, seconds=None), weight=1.0)
        self._last_step_at = None

    def _begin(self, part: Part) -> None:
        if not self.delay:
            self._apply(self._start(part, due=self.steps, seconds=None))
            return
        offsets = [other.fragment.offset for other in self._parts if other is not part]
        turn = min([self.delay, *((offset - part.fragment.offset) % self.every for offset in offsets)])
        step_s = statistics.median(self._times) if self._times else 0.0
        self._start(part, due=self.steps + self.delay, seconds=_SHARE_OF_TIME * turn * step_s)

    def _start(self, part: Part, *, due: int, seconds: float | None) -> _Pending:
        buffer = self._masters.region(part)
        name = f"synchronisation of fragment {part.fragment.index} after step {self.steps}"
        update = functools.partial(self._outer.update, part, self._outer.stepping())
        work = Synchronisation(name, buffer, update, seconds, part.differences)
        pending = _Pending(part, due, work, buffer)
        self._pending.append(pending)
        self._exchange.start(work)
        return pending

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
        self._masters.mix(one.part.split(one.buffer), self.blend if weight is None else weight)
        self._moved[one.part.fragment.index] = take_traffic(one.part, self._masters, self._exchange)

    # ---- reports

    def memory(self) -> MemoryReport:
        """Bytes that a rank holds for this now: anchor and outer states under `optimizer`, fragments in flight under
        `buckets`.
        """
        in_flight = sum(one.buffer.nbytes for one in self._pending)
        return MemoryReport(**self._outer.memory(), buckets=in_flight)

    def traffic(self) -> TrafficReport:
        """What the last synchronisation of each fragment moved, summed over all ranks of all islands: a round of it."""
        return total(self._moved.values())

    def predicted_traffic(self) -> TrafficReport:
        """What a round must move, from the layout alone; `by_operation` of `traffic()` equals it."""
        return total(predict_traffic(part, self._masters, self._exchange) for part in self._parts)

    # ---- the state

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
            streams: dict[str, Tensor] = {}
            for name, piece in self._outer.arrays(part).items():
                streams[name] = torch.zeros(part.numel, dtype=piece.dtype)
                streams[name][part.own] = piece
            if part.differences is not None:
                # What all islands owe together, in the pieces of their ranks.
                self._exchange.sum(f"save after step {self.steps}", part.differences.lost.view(-1))
                streams[LOST] = part.differences.lost.view(-1).clone()
            for region in streams.values():
                self._exchange.gather(f"save after step {self.steps}", region)
            if part.differences is not None:
                streams[KNOWN] = part.differences.known.view(-1).clone()
            for name, region in streams.items():
                found.setdefault(name, {}).update(part.split(region))
        return found

    def plain_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside `streams`: the position in the round, options, states that are no arrays."""
        return {
            "steps": self.steps,
            "pending": [[one.part.fragment.index, one.due - self.steps] for one in self._pending],
            **self._outer.plain_state(),
        }

    def accepted(self, names: Iterable[str]) -> list[str]:
        """Those streams of a checkpoint that fit; all states of the outer optimizer or none, which then begin anew."""
        fits = set(names) - KEPT_APART == self._outer.kinds
        return sorted(set(names) if fits else set(names) & KEPT_APART)

    def expect(self, names: Iterable[str]) -> dict[str, dict[int, Tensor]]:
        """Room for the streams of these names that a checkpoint has, to be filled and given to `restore`."""
        return {
            name: {
                index: shard
                for part in self._parts
                for index, shard in part.split(torch.zeros(part.numel, dtype=torch.float32)).items()
            }
            for name in names
        }

    def require_loadable(
        self, streams: Mapping[str, Mapping[int, Tensor]], plain: Mapping[str, Any] | None
    ) -> None:
        """Raise `UsageError` for a checkpoint that `restore` would lose something of: what is in flight, or owed."""
        self._outer.require_loadable(streams, plain)

    def restore(self, streams: Mapping[str, Mapping[int, Tensor]], plain: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint's state; from one without it, begin the first round with the weights of now."""
        self._forget()
        regions: dict[int, Tensor] = {}
        for part in self._parts:
            if part.anchor is None:
                continue
            filled = {name: part.join(shards) for name, shards in streams.items()}
            filled.setdefault(ANCHOR, self._masters.region(part))
            if part.differences is not None and KNOWN not in filled:
                known = filled[ANCHOR].clone()  # islands may differ in what they have loaded
                self._exchange.gather("load", known)
                filled[KNOWN] = known
            self._outer.restore_arrays(part, filled)
            regions[part.fragment.index] = filled[ANCHOR if part.differences is None else KNOWN]
        if plain is None:
            return
        self.steps = plain["steps"]
        self._outer.restore_plain(plain)
        for index, left in plain["pending"]:
            self._pending.append(_Pending(self._parts[index], self.steps + left, None, regions[index]))

    def at_save(self, step: int, value: _T) -> list[_T]:
        """Every island's `value` in the save of `step`, in order. Called by one rank of each."""
        return self._saves.all(f"save of step {step}", value)

    def at_load(self, value: _T) -> list[_T]:
        """Every island's `value` in a load, in order."""
        return self._exchange.all("load", value)

    def _forget(self) -> None:
        self._arrive()
        self._pending.clear()
        self._moved.clear()
        self._times.clear()
        self._last_step_at = None
        self.steps = 0
        if self.outer is not None:
            self.outer.state.clear()

    # ---- the start

    def _take_over_island_0(self) -> None:
        name = "start of LocalSteps"
        self._masters.settle()
        for part in self._parts:
            buffer = self._masters.region(part)
            self._exchange.broadcast(name, buffer)
            self._masters.mix(part.split(buffer), 1.0)
            part.set_anchor(buffer)
            if part.differences is not None:
                part.differences.known.view(-1).copy_(buffer)
        with torch.no_grad(), self._masters.frozen() as frozen:
            for tensor in [*frozen, *self._masters.model.buffers()]:
                self._exchange.broadcast(name, tensor)
        self._masters.exchanged()
