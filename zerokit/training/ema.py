"""`Ema`: an exponential moving average of the weights, sharded across ranks like the optimizer states.

It is kept as a state of the flat tensors, beside the optimizer's own, so that it is cut, saved, loaded
and resharded with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerokit.errors import UsageError
from zerokit.runtime.homes import reserve
from zerokit.runtime.optimizer import ZeroOptimizer
from zerokit.runtime.states import AVERAGED, EMA
from zerokit.runtime.unit import UnitState
from zerokit.training.arguments import require_zero_optimizer


class Ema:
    """Averages the master weights: average ← decay · average + (1 − decay) · weights, at each `update`.

    A rank averages what it updates: 4 bytes an element of its shard with fp32 masters, so 4Ψ/N bytes, or 4Ψ at stage 0.
    The first `update` copies the weights, as `torch.optim.swa_utils.AveragedModel` does. Frozen parameters do not
    change, and buffers are the model's.

    The average is part of the optimizer's state. `zerokit.save` writes it as a stream `ema` beside `master`, which any
    number of ranks can load into an optimizer that has an `Ema`; `optimizer.state_dict()` has this rank's part.
    `decay` is not saved: it is an attribute, and may be set anew. `zerokit.consolidate(…, stream="ema")` writes the
    averaged weights of a checkpoint for Hugging Face's loaders. Weights that are loaded without the optimizer's state
    (`weights_only=True`) begin the average anew.

        ema = zerokit.Ema(optimizer, decay=0.999)
        ...
        optimizer.step()
        ema.update()
        ...
        with ema.applied():
            evaluate(model)

    Args:
        optimizer: whose weights are averaged; it has at most one average.
        decay: from 0 (the weights as they are) to 1 (the average stays).

    Raises:
        UsageError: for a decay outside 0 to 1, for an optimizer that has an average or a state of that name, and,
            with states on a disk, on all ranks where one has no room for an average. All ranks build it together.
    """

    def __init__(self, optimizer: ZeroOptimizer, decay: float = 0.999) -> None:
        require_zero_optimizer(optimizer, "Ema(optimizer, decay=0.999)")
        if optimizer.ema is not None:
            raise UsageError("this optimizer has an average already: use optimizer.ema")
        if any(EMA in states.kinds for states in optimizer.runtime.states):
            raise UsageError(
                f"{type(optimizer.runtime.inner).__name__} keeps a state called {EMA!r} itself: its checkpoints could "
                "not tell the two apart"
            )
        self.decay = decay
        runtime = optimizer.runtime
        sizes = [master.tensor.nbytes for _, master, _ in runtime.masters()]
        reserve(runtime.home, sizes, runtime.collectives, "Ema()")
        # It holds this object: a cycle would keep the model's memory.
        self._optimizer = weakref.ref(optimizer)
        self._runtime = optimizer.runtime
        for part in optimizer.runtime.parts:
            _keep_aside(part.optimizer)
        optimizer.ema = self

    @property
    def decay(self) -> float:
        """The weight of the past at the next `update`."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        if not 0.0 <= decay <= 1.0:
            raise UsageError(f"decay={decay!r}: expected a number from 0 to 1, such as 0.999")
        self._decay = float(decay)

    @torch.no_grad()
    def update(self) -> None:
        """Take the current weights into the average; call it after `step`. Nothing is communicated.

        After a step that was left out the average stays as it is. Raises `UsageError` inside `applied()`.

        With states on a disk the ranks tell each other whether all of them could read and write theirs, and all raise
        `StorageError` where one could not.
        """
        optimizer = self._living()
        optimizer.require_own_weights("update()")
        left_out = self._runtime.control.left_out
        if left_out is True:
            return
        self._runtime.engine.take_changes()
        runtime = self._runtime
        take, agree = partial(self._take, left_out=left_out), runtime.control.require_all_well
        with optimizer.refusing_if_lost():
            runtime.home.tour(runtime.units, take, writes=True, agree=agree)

    def _take(self, units: Sequence[UnitState], left_out: bool | Tensor) -> None:
        for unit in units:
            if unit.owned and not unit.separate:
                unit.complete()  # its whole tensors lie where a gather still writes what other ranks keep
        averages, weights, states = [], [], self._runtime.inner.state
        for master in (master for unit in units for master in unit.masters):
            state = states.get(master.tensor, {})
            if EMA in state:
                averages.append(state[EMA])
                weights.append(master.tensor.detach())
            else:
                states[master.tensor][EMA] = master.tensor.detach().clone()
        if isinstance(left_out, Tensor):  # the host does not know yet
            for average, weight in zip(averages, weights, strict=True):
                average.copy_(torch.where(left_out, average, torch.lerp(average, weight, 1.0 - self.decay)))
        elif averages:
            torch._foreach_lerp_(averages, weights, 1.0 - self.decay)

    def restart(self) -> None:
        """Reset the average: the next `update` starts it from the weights, as in a new `Ema`.

        Raises `UsageError` inside `applied()`.
        """
        self._living().require_own_weights("restart()")
        for _, _, state in self._runtime.masters():
            state.pop(EMA, None)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; afterwards its own again, to the bit. All ranks enter together.

        Costs the memory of the largest flat tensor, and at stages 1 and 2 a gather of the weights at either end. The
        model can run inside, and `gathered()` and `state_dict()` show averages; changes made there stay in the average.

        Raises `UsageError` before the first `update`, and where the weights cannot be exchanged now; inside, `step`,
        `zerokit.save` and `zerokit.load` are refused.
        """
        optimizer = self._living()
        self._require_exchangeable(optimizer)
        self._exchange()
        try:
            with optimizer.refusing(AVERAGED):
                yield
        finally:
            self._exchange()

    def _require_exchangeable(self, optimizer: ZeroOptimizer) -> None:
        optimizer.require_own_weights("applied()")
        if optimizer.refusal:
            raise UsageError(f"applied() refused: {optimizer.refusal}")
        runtime = self._runtime
        if runtime.engine.is_open:
            raise UsageError("applied() inside gathered(): enter applied() first, and gathered() inside")
        if runtime.gradients.shown:
            raise UsageError("applied() inside gathered_gradients(): leave that context first")
        runtime.control.finish()
        # A rank that owns nothing cannot know by itself.
        begun = any(EMA in state for _, _, state in runtime.masters())
        if not runtime.collectives.any(begun, "applied()"):
            raise UsageError("applied() before the first update(): there is no average yet")

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange weights and averages, on every rank."""
        self._runtime.control.finish()
        runtime = self._runtime
        runtime.settle()

        def swap(units: Sequence[UnitState]) -> None:
            for master in (master for unit in units for master in unit.masters):
                state = runtime.inner.state.get(master.tensor, {})
                if EMA in state:
                    weights: Tensor = master.tensor.detach()
                    held = weights.clone()
                    weights.copy_(state[EMA])
                    state[EMA].copy_(held)

        with self._living().refusing_if_lost():
            runtime.home.tour(runtime.units, swap, writes=True, agree=runtime.control.require_all_well)
            runtime.publish()

    def _living(self) -> ZeroOptimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise UsageError("the optimizer of this average is gone: keep it as long as its Ema")
        return optimizer


def _keep_aside(inner: Optimizer) -> None:
    """Hide averages from `inner.step()` where there is nothing else: an optimizer makes its states where it finds none.

    That is so before its first step, and for parameters that are frozen later.
    """
    aside: dict[Tensor, Tensor] = {}

    def hide(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        show(optimizer, args, kwargs)  # what a step that failed has left
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if optimizer.state.get(tensor, {}).keys() == {EMA}:
                    aside[tensor] = optimizer.state.pop(tensor)[EMA]

    def show(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        while aside:
            tensor, average = aside.popitem()
            optimizer.state[tensor][EMA] = average

    inner.register_step_pre_hook(hide)
    inner.register_step_post_hook(show)
