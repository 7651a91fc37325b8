"""The parts of a step: the ranks' agreement, and the update of the masters."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from zerokit.errors import LayoutMismatch, StorageError, UsageError
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.collectives.base import Sums
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.inner import parts_of
from zerokit.runtime.masters import write_back
from zerokit.runtime.nonfinite import warn_of_skip
from zerokit.runtime.norms import NUMBERS
from zerokit.runtime.torch_internals import leaves_out_steps, leaving_out
from zerokit.runtime.turns import Turns
from zerokit.runtime.unit import UnitState
from zerokit.runtime.wholes import WholeTensors
from zerokit.skips import Skips

_RECEIVED, _COUNTED, _COUNT, _NONFINITE = 4, 5, 7, 8
"""Places among a step's numbers: ranks that have gradients, ranks that have counts, their sum, and ranks whose
gradients are not finite."""


class StepControl:
    """The ranks' agreement before a step: whether any has gradients, of how many samples or tokens, whether all are
    finite, and all have the same schedule.

    Where the host runs ahead of a device, it looks at a step's numbers in the next step, so as not to wait for the
    device. Only a rank that has no gradients looks at once, and all do where they must know before the update.
    """

    def __init__(self, collectives: Collectives, gradients: Gradients, inner: Optimizer) -> None:
        self.collectives, self.gradients, self.inner = collectives, gradients, inner
        self.leaves_out = all(leaves_out_steps(optimizer) for optimizer in parts_of(inner))
        """Whether a step can be left out on a device, unknown to the host."""
        self._pending: tuple[Sums, Tensor | None] | None = None
        """A step's numbers that the host has not looked at, and whether that step was left out."""
        self.skips = Skips()

    def agree(self, finite: Tensor | None, *, known: bool, waits: bool) -> Agreement:
        """What ranks have, all together; `finite` (0-d, bool) says of this rank's gradients whether they are.

        `known` if it says so of all ranks' gradients; `waits` if the host must know before the update.

        Raises `UsageError` where no rank has gradients, `LayoutMismatch` where ranks took different paths, or where
        the losses of some have counts and those of others have none.
        """
        path = (self.collectives.schedule ^ self._digest()) & 0xFFFFFFFF
        high, low = path >> 16, path & 0xFFFF
        received, count = self.gradients.received, self.gradients.count
        counted = count is not None
        sums = self.collectives.sum_soon(
            [
                *(high, high**2, low, low**2),
                *(float(received), float(counted), float(received and not counted)),
                0.0 if count is None else count,
                0.0 if finite is None else ~finite,
            ]
        )
        self.finish()
        late = self.collectives.runs_ahead and not waits
        # A rank alone never says that there is nothing to do: one without tokens looks whether others have some.
        looks = not late or not received or (not isinstance(count, Tensor) and count == 0)
        numbers = sums.read() if looks else []
        if looks and not numbers[_RECEIVED]:
            self.gradients.forget()
            raise UsageError(
                "step() before any backward(): no rank has gradients. Call optimizer.backward(loss) first"
            )
        counted = counted or (looks and numbers[_COUNTED] > 0)
        empty = looks and counted and not numbers[_COUNT]
        if late:
            total = sums.at(_COUNT) if counted else None
            left_out = ~finite if finite is not None and known else None
            if self.leaves_out and left_out is None and (finite is not None or total is not None):
                left_out = sums.at(_NONFINITE) > 0
                left_out = left_out if total is None else left_out | (total <= 0)
            self._pending = sums, left_out
            return Agreement(empty=empty and left_out is None, count=total, left_out=left_out)
        self._require_one_path(numbers)
        total = torch.tensor(numbers[_COUNT], dtype=torch.float64) if counted else None
        return Agreement(overflow=numbers[_NONFINITE] > 0, empty=empty, count=total)

    def require_all_well(self, failed: bool) -> None:
        """Raise `StorageError` where any rank has `failed`. All ranks come here together."""
        count, number = self.sum_now([float(failed), self.collectives.rank * float(failed)])
        if count:
            who = f"rank {number:.0f}" if count == 1 else f"{count:.0f} ranks"
            raise StorageError(
                f"{who} could not read, update or write masters and states: see the error there. Steps and saves are "
                "refused here, too, where the update had begun: load a checkpoint"
            )

    def sum_now(self, values: Sequence[float]) -> Sequence[float]:
        """The sums of `values` over ranks, in a message of the length that all have."""
        padding = [0.0] * (NUMBERS - len(values))
        return self.collectives.sum_soon([*values, *padding]).read()[: len(values)]

    def finish(self) -> None:
        """Check pending results. Raises `LayoutMismatch` like `agree`, without communication."""
        pending, self._pending = self._pending, None
        if pending is not None:
            sums, left_out = pending
            numbers = sums.read()
            self._require_one_path(numbers)
            if left_out is not None:
                nonfinite = numbers[_NONFINITE] > 0
                empty = numbers[_COUNTED] > 0 and not numbers[_COUNT]
                self.note(skipped=nonfinite or empty, warns=nonfinite)

    def note(self, *, skipped: bool, warns: bool) -> None:
        """Count a step, and warn of the first one that was left out."""
        if warns and not self.skips.total:
            warn_of_skip()
        self.skips = self.skips.after(skipped=skipped)

    def resume(self, skips: Skips) -> None:
        """Count on from a state that was loaded."""
        if self._pending is not None:
            self._pending = self._pending[0], None
        self.skips = skips

    @property
    def left_out(self) -> bool | Tensor:
        """Whether the last step was left out; 0-d where the host does not know it yet."""
        if self._pending is not None and self._pending[1] is not None:
            return self._pending[1]
        return self.skips.in_a_row > 0

    def _digest(self) -> int:
        """A checksum of the parameters that are left out, and of the groups' numbers (tensors would be waited for)."""
        stopped = [(index, *sorted(unit.skipped)) for index, unit in self.gradients.units.items()]
        numbers = [
            [(name, float(value)) for name, value in group.items() if type(value) in (int, float)]
            for group in self.inner.param_groups
        ]
        return zlib.crc32(repr((stopped, numbers)).encode())

    def _require_one_path(self, numbers: Sequence[float]) -> None:
        """`numbers` begin with the sums of the ranks' paths, 16 bits at a time, and of their squares."""
        high, squares_high, low, squares_low, _, counted, means, *_ = map(int, numbers)
        world = self.collectives.world
        # Numbers are equal where the mean of their squares is the square of their mean; sums are exact.
        if world * squares_high != high**2 or world * squares_low != low**2:
            raise LayoutMismatch(
                "ranks issued different sequences of collectives (in this step, or in a pass that failed on some of "
                "them), or have frozen different parameters, set other numbers in param_groups, or changed weights or "
                "loaded a state differently since ZeroOptimizer was built: their models must take the same path, "
                "requires_grad_() and load_state_dict() be called alike on all ranks, and learning rates follow an "
                "averaged loss"
            )
        if counted and means:
            raise LayoutMismatch(
                f"backward() had a count= on {counted} ranks and none on {means}: the one adds up sums, the other means"
            )


@dataclass(frozen=True, slots=True)
class Agreement:
    """What ranks have in a step, all together.

    Attributes:
        overflow: whether gradients of some rank are not finite.
        empty: whether losses are sums over nothing.
        count: the samples or tokens that they are sums over, 0-d; None where they are means.
        left_out: whether one of the two holds, 0-d, where a device knows it and the host does not.
    """

    overflow: bool = False
    empty: bool = False
    count: Tensor | None = None
    left_out: Tensor | None = None

    @property
    def updates(self) -> bool:
        """Whether the inner optimizer is to step."""
        return not (self.overflow or self.empty)


INTERRUPTED = (
    "an exception ended the last update halfway, so the state is incomplete: load a checkpoint, or build the "
    "model anew"
)
"""Why steps are refused after that; a load of weights alone does not make up for it."""


Update: TypeAlias = Callable[[Sequence[UnitState]], None]
Tour: TypeAlias = Callable[[Sequence[UnitState], Update], None]
"""Calls an update with units whose masters and states are here then, until it has had all."""


def update_masters(
    units: Sequence[UnitState],
    gradients: Gradients,
    inner: Optimizer,
    wholes: WholeTensors,
    tour: Tour,
    left_out: Tensor | None = None,
) -> None:
    """Run `inner` over all masters with the reduced gradients, while a `tour` has them here, and write them back.

    Nothing changes where `left_out`, which is on the device, is true.
    """
    trainable = [unit for unit in units if unit.unit.trainable]
    for unit in trainable:
        skipped = gradients.units[unit.index].skipped
        if skipped and not all(
            skipped.issuperset(positions) or skipped.isdisjoint(positions)
            for positions in map(unit.positions_in, unit.slices)
        ):
            unit.divide(inner)
        unit.unguard_masters()
    # At least one turn of each, as what a class counts must be alike on all ranks.
    turns = {optimizer: Turns(optimizer) for optimizer in parts_of(inner)}
    try:
        with wholes.updating(turns) as update_wholes:

            def update(present: Sequence[UnitState]) -> None:
                _give_gradients(present, gradients)
                for optimizer, turn in turns.items():
                    if isinstance(optimizer, SGD):
                        _level_momentum(optimizer, all_begin=left_out is not None)
                    with leaving_out(optimizer, left_out):
                        turn.step()
                _take_gradients(present)
                update_wholes(present)
                write_back(present)

            tour(trainable, update)
    finally:
        _take_gradients(trainable)
        for unit in trainable:
            unit.guard_masters()


def _give_gradients(units: Sequence[UnitState], gradients: Gradients) -> None:
    for unit in units:
        own = gradients.units[unit.index]
        skipped = own.skipped
        for master in unit.slices:
            if skipped and skipped.issuperset(unit.positions_in(master)):
                continue  # as in torch, what has no gradient keeps its value and its states
            gradient = own.held.at(master.interval)
            tensor = master.tensor
            tensor.grad = gradient if gradient.dtype == tensor.dtype else gradient.to(tensor.dtype)


def _take_gradients(units: Sequence[UnitState]) -> None:
    for unit in units:
        for master in unit.slices:
            master.tensor.grad = None


@contextmanager
def unless_updated(
    inner: Optimizer, control: StepControl, refused: Callable[[], None]
) -> Iterator[Callable[[bool], None]]:
    """Call `refused` where the body raises before anything of `inner` has changed.

    Schedule-free optimizers refuse a step in the mode of evaluations. Gives the body a function that raises
    `StorageError` where any rank has failed; nothing has changed then if it has not on any rank.
    """
    before, changed_elsewhere = _values(inner), False

    def unchanged() -> bool:
        return all(_same(*pair) for pair in zip_longest(before, _values(inner)))

    def agree(failed: bool) -> None:
        nonlocal changed_elsewhere
        try:
            control.require_all_well(failed)
        except StorageError:
            (changed,) = control.sum_now([float(not unchanged())])
            changed_elsewhere = changed > 0
            raise

    try:
        yield agree
    except BaseException:
        if not changed_elsewhere and unchanged():
            refused()
        raise


_Value = tuple[object, int]
"""An option, a parameter or a state, with how often it was written if it is a tensor."""


def _values(inner: Optimizer) -> list[_Value]:
    """Everything that a step may change."""
    tensors = [tensor for group in inner.param_groups for tensor in group["params"]]
    values = [*tensors, *(value for tensor in tensors for value in inner.state.get(tensor, {}).values())]
    values += [value for group in inner.param_groups for name, value in group.items() if name != "params"]
    return [(value, value._version if isinstance(value, Tensor) else 0) for value in values]


def _same(one: _Value | None, other: _Value | None) -> bool:
    return one is not None and other is not None and one[0] is other[0] and one[1] == other[1]


def _level_momentum(inner: SGD, *, all_begin: bool) -> None:
    """Let tensors that begin late in a group have a momentum, which fused kernels want for all or none.

    `all_begin`: those of a first step too, which leaves them without a value where it is left out.
    """
    for group in inner.param_groups:
        active = [tensor for tensor in group["params"] if tensor.grad is not None]
        late = [tensor for tensor in active if inner.state.get(tensor, {}).get("momentum_buffer") is None]
        if not late or (len(late) == len(active) and not all_begin) or not group["momentum"]:
            continue
        if group.get("dampening"):
            group["fused"] = False
            continue
        for tensor in late:  # zeros give what the first step gives without dampening
            inner.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
