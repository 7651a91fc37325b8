"""When units are gathered, and for how long: what all stages share, and stages 0 to 2.

At these stages parameters stay whole. At stages 1 and 2 their owners update them, and every rank gathers them right
after the step, behind whatever the host does next; they are waited for unit by unit, in the next forward or when
a parameter is read before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import torch

from zerokit.errors import ScheduleError, UsageError
from zerokit.placement import Placement
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.linux import Heap
from zerokit.runtime.schedule import BackwardPlan, ForwardPass
from zerokit.runtime.storage import UnitState

_LAST_WAIT_S = 2.0
"""What others have updated is on its way since their step; they read this rank's part as soon as they wait."""


class Gathering:
    """Stages 0 to 2, and the order of units that every stage records.

    `units` are all units in line order; those without `scopes` hold the rest of the model's parameters, which the
    root module may use at any time.
    """

    def __init__(self, units: Sequence[UnitState], collectives: Collectives, placement: Placement) -> None:
        self._placement = placement
        self._units = units
        self._collectives = collectives
        rest = [unit.unit.index for unit in units if not unit.unit.scopes]
        self.kept = frozenset(rest)
        """Units that stay gathered from their first use to the end of backward, whatever uses them."""
        self.forward_order = rest + [unit.unit.index for unit in units if unit.unit.scopes]
        self.recorded = False
        """Whether `forward_order` is what a forward pass of rank 0 did."""
        self.lazy: frozenset[int] = frozenset()
        """Units whose weights are used only inside modules that announce it: needed when those are entered."""
        self._trace: list[int] = []
        self._read_early: set[int] = set()
        self._active: dict[int, int] = {}
        self._updated: list[int] = []
        self._open = 0
        self._heap = Heap(collectives.device, settles=not placement.cuts_parameters)

    # ---- after the optimizer step, stages 1 and 2

    def gather_updated(self) -> None:
        """Start gathering what its owners have updated, on every rank.

        Another rank may have left after its last step; an error is raised when the values are needed.
        """
        if not self._placement.update:
            return
        self._updated = [i for i in dict.fromkeys(self.forward_order) if self._units[i].unit.trainable]
        with suppress(ScheduleError):
            self._refresh()

    def _refresh(self) -> None:
        while self._updated:
            self._units[self._updated[0]].gather_update()
            del self._updated[0]

    def finish_updates(self) -> None:
        """Nobody will wait for updates that are on their way: the optimizer is gone, and the model goes on.

        The garbage collector may call this in the midst of another optimizer's collectives, in which other ranks wait.
        """
        self._collectives.wait_at_most(_LAST_WAIT_S)
        with suppress(ScheduleError):
            self.make_current()

    def make_current(self) -> None:
        """Let the parameters that are whole at this stage hold their current values."""
        self._refresh()
        for unit in self._units:
            unit.complete()
        self._collectives.wait_for_readers()

    def read(self, index: int, name: str, *, in_forward: bool, in_backward: bool) -> None:
        """Parameter `name` of unit `index` is about to be used outside the modules that announce it.

        Raises `UsageError` where this rank alone cannot have its value (stage 3, outside the model's forward).
        """
        self._refresh()
        self._units[index].complete()

    # ---- forward

    def begin_forward(self, current: ForwardPass) -> None:
        self._trace.clear()
        self._read_early.clear()
        self._active.clear()
        self._refresh()
        for unit in self._units:
            if unit.update is None or unit.unit.index not in self.lazy:
                unit.ready()

    def enter(self, unit: UnitState) -> None:
        """`unit` is about to be used in forward."""
        self._note(unit.unit.index)
        unit.ready()

    def enter_aside(self, unit: UnitState) -> None:
        """A module of `unit` was called by itself, outside the model's forward."""
        self._refresh()
        unit.ready()

    def is_active(self, unit: UnitState) -> bool:
        """Whether a module of `unit` is at work."""
        return self._active.get(unit.unit.index, 0) > 0

    def active_units(self) -> list[UnitState]:
        """Units with modules at work."""
        return [self._units[index] for index, count in self._active.items() if count > 0]

    def activate(self, unit: UnitState) -> None:
        self._active[unit.unit.index] = self._active.get(unit.unit.index, 0) + 1

    def leave(self, unit: UnitState) -> bool:
        """A module of `unit` has returned. True when it was the outermost one at work."""
        index = unit.unit.index
        self._active[index] = self._active.get(index, 1) - 1
        return self._active[index] <= 0

    def pin(self, unit: UnitState) -> None:
        """No hook will show when backward reads `unit`: it stays gathered until then."""

    def hold(self) -> None:
        """Backward makes a graph of its own, which reads weights again: all of them stay until `drop`."""

    def drop(self) -> None:
        """What `hold` kept is not needed any more, or about to be updated."""

    def end_forward(self, *, training: bool) -> None:
        """All ranks have used what they wanted, and may change it."""
        self.make_current()
        self._guard_all()
        if training:
            self._heap.note_forward()
        self._active.clear()

    # ---- backward

    def begin_backward(self) -> None:
        self._unguard_all()

    def enter_backward(
        self, units: Sequence[UnitState], current: ForwardPass | None, *, recomputing: bool = False
    ) -> None:
        """The gradient of an output of `units` is there, or a checkpoint is about to run their forward again."""

    def end_backward(self, current: ForwardPass | None) -> None:
        """Issue what this rank did not need but others may have; `current` is a pass that backward belongs to."""

    def free_all(self) -> None:
        """The pass is over, or given up."""
        self.make_current()
        self._guard_all()
        self._active.clear()

    # ---- whole parameters, for their user

    @property
    def is_open(self) -> bool:
        return self._open > 0

    def open(self) -> None:
        """Gather every parameter and leave it so until `close`."""
        self._open += 1
        if self._open == 1:
            self._gather_whole()

    def close(self) -> None:
        self._open -= 1
        self.free_all()

    def _gather_whole(self) -> None:
        self.free_all()

    # ---- the order

    plan: BackwardPlan | None = None
    """The order of backward, where units are gathered there."""

    @property
    def deviated(self) -> bool:
        """Whether this forward pass left the recorded order, as all ranks agreed."""
        return False

    def trace(self, lazy: Collection[int]) -> list[int]:
        """The order of this forward on this rank, every unit at least once.

        Kept units appear once; those that cannot be gathered lazily come first. Between two uses of a unit with only
        kept ones in between it stays gathered. Units that this rank left out follow their neighbours on the line, so
        that ranks that use them meet them in order.
        """
        kept = self.kept | self._read_early
        order = [u.unit.index for u in self._units if not u.unit.scopes and u.unit.index not in lazy]
        last = -1
        for index in self._trace:
            if index not in order or (index not in kept and last != index):
                order.append(index)
            if index not in kept:
                last = index
        for index in range(len(self._units)):
            if index not in order:
                before = max((at for at, other in enumerate(order) if other == index - 1), default=-1)
                order.insert(before + 1, index)
        return order

    def used_anywhere(self) -> list[int]:
        """Kept units, and those that this rank's forward has used outside their modules."""
        return sorted(self.kept | self._read_early)

    def adopt_order(self, order: Sequence[int], lazy: Collection[int], kept: Collection[int]) -> None:
        self.forward_order = list(order)
        self.lazy = frozenset(lazy)
        self.kept = frozenset(kept)
        self.recorded = True

    def _note(self, index: int) -> None:
        if self._trace[-1:] != [index]:
            self._trace.append(index)

    def _guard_all(self) -> None:
        for unit in self._units:
            unit.guard()

    def _unguard_all(self) -> None:
        for unit in self._units:
            unit.unguard()


def refuse_reading(name: str) -> UsageError:
    """The error for using a freed parameter where its unit cannot be gathered."""
    if torch._guards.CompileContext.try_get() is not None:
        return UsageError(
            f"a graph of torch.compile reads {name}, which stage 3 has divided over ranks, outside its unit's module: "
            "compile the units instead, `for block in model.blocks: block.compile()`"
        )
    return UsageError(
        f"{name} is divided over ranks between its uses (stage 3), so it cannot be read or changed here: do it inside "
        "`with optimizer.gathered():`, which all ranks enter, or in the model's forward, where reading gathers it"
    )
