"""Waits of the device's way, each taken away, and the training in which that must be noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.devices import Training
from tests.support.streams import Awaited
from zerokit.runtime.buckets import UnitGradients
from zerokit.runtime.collectives import DONE, Work
from zerokit.runtime.collectives.nccl import NcclCollectives
from zerokit.runtime.collectives.route import Hop, Kind
from zerokit.runtime.collectives.streams import Operation
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.shards import Shards
from zerokit.runtime.unit import UnitState
from zerokit.runtime.wholes import WholeTensors, _UnitWholes


def _twice(training: Training) -> None:
    """Two updates from the same gradients: the second one changes what the gathers of the first still read."""
    for step in range(training.run.steps):
        training.differentiate(step)
        training.optimizer.step()
        training.update()


def _show_gradients(training: Training) -> None:
    for step in range(training.run.steps):
        training.differentiate(step)
        with training.optimizer.gathered_gradients():
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
        training.update()


def _fail_in_backward(training: Training) -> None:
    """A backward pass that ends in an exception while reductions are in flight, then a step as usual."""

    def fail(*gradients: Any) -> None:
        raise ArithmeticError("in the middle of backward")

    for step in range(training.run.steps):
        handle = training.model.get_submodule("blocks.1").register_full_backward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            training.differentiate(step)
        handle.remove()
        training.optimizer.zero_grad()
        training.step(step)


def _clear_late(training: Training) -> None:
    """Gradients are dropped between forward and backward: nothing but forward waits for what a step has gathered."""
    for step in range(training.run.steps):
        training.differentiate(step, clear=True)
        training.optimizer.step()


def all_steps(training: Training) -> None:
    for step in range(training.run.steps):
        training.step(step)


def _forget(unit: UnitState) -> None:
    unit.in_flight = None


def _forget_to_wait_for_gathers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UnitState, "complete", _forget)


def _give_buckets_back_too_early(patch: pytest.MonkeyPatch) -> None:
    def finish_oldest(self: Gradients) -> None:
        unit, _ = self._reductions.popleft()
        unit.finish()

    patch.setattr(Gradients, "_finish_oldest", finish_oldest)


def _forget_the_readers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NcclCollectives, "wait_for_readers", lambda self: None)


def _break_the_chain(patch: pytest.MonkeyPatch) -> None:
    def chain(self: NcclCollectives, kind: Kind, hops: Sequence[Hop]) -> Work:
        return [hop(None) for hop in hops][-1] if hops else DONE

    patch.setattr(NcclCollectives, "_chain", chain)


def _forget_to_wait_for_shown_gradients(patch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def wait(self) -> None:
            pass

    show, start = UnitGradients.show, NcclCollectives.start

    def start_only(*arguments: Any) -> Work:
        start(*arguments)
        return Nothing()

    def show_at_once(self: UnitGradients) -> Shards:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(NcclCollectives, "start", start_only)
            return show(self)

    patch.setattr(UnitGradients, "show", show_at_once)


def _forget_reductions_when_forgetting(patch: pytest.MonkeyPatch) -> None:
    """What `forget` waits for, `free_all` waits for once more: both must go."""
    _forget_the_readers(patch)
    forget = Gradients.forget

    def forget_without_waiting(self: Gradients, **options: bool) -> None:
        self._reductions.clear()
        forget(self, **options)

    patch.setattr(Gradients, "forget", forget_without_waiting)


def _forget_to_wait_for_gradients_of_owners(patch: pytest.MonkeyPatch) -> None:
    collect = _UnitWholes.collect

    def without_wait(self: _UnitWholes, gradients: Gradients) -> tuple[Work, torch.Tensor]:
        work, memory = collect(self, gradients)
        kept.append(work)
        return DONE, memory

    kept: list[Work] = []
    patch.setattr(_UnitWholes, "collect", without_wait)


def _forget_to_wait_for_owners(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WholeTensors, "_finish", lambda self, works: None)


def _drop_what_is_sent(patch: pytest.MonkeyPatch) -> None:
    def keep_nothing(self: Awaited, late: Any, operation: Operation) -> None:
        self.late = late

    patch.setattr(Awaited, "__init__", keep_nothing)


@dataclass(frozen=True)
class Mutation:
    """A wait that is taken away, how to train then, and the stages at which that must be noticed."""

    apply: Callable[[pytest.MonkeyPatch], None]
    stages: tuple[int, ...]
    loop: Callable[[Training], None] = all_steps
    scene: str = "plain"


MUTATIONS = {
    # A model without indices: on a GPU a gather that is not waited for overwrites memory of others.
    "gathers are not waited for": Mutation(
        _forget_to_wait_for_gathers, (1, 2, 3), loop=_clear_late, scene="units used again"
    ),
    "buckets come back too early": Mutation(_give_buckets_back_too_early, (2, 3)),
    # At stage 0 the addition waits for readers, and so for the sum itself.
    "sums are added to too early": Mutation(
        _give_buckets_back_too_early, (1, 2, 3), scene="repeated reductions"
    ),
    "the gather of sums begins too early": Mutation(_break_the_chain, (0,)),
    "readers are not waited for": Mutation(_forget_the_readers, (1, 2), loop=_twice),
    "shown gradients are not waited for": Mutation(
        _forget_to_wait_for_shown_gradients, (1, 2, 3), loop=_show_gradients
    ),
    "a failed backward leaves reductions behind": Mutation(
        _forget_reductions_when_forgetting, (0, 1, 2, 3), loop=_fail_in_backward
    ),
    "gradients of owners are not waited for": Mutation(
        _forget_to_wait_for_gradients_of_owners, (1, 2, 3), scene="whole tensors"
    ),
    "what owners have updated is not waited for": Mutation(
        _forget_to_wait_for_owners, (1, 2, 3), scene="whole tensors"
    ),
    "what owners send is dropped too early": Mutation(_drop_what_is_sent, (1, 2, 3), scene="whole tensors"),
}

ALONE = {"gathers are not waited for": (3,), "sums are added to too early": (1, 2)}
"""Some of them, with stages, that a rank alone notices: it gathers nothing from others, so that fewer waits matter."""
