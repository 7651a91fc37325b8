"""Follows a model's forward and backward passes by hooks, and keeps gathering and gradients in step with them.

The hooks hold weak references only, so that deleting the model and the optimizer frees their memory.

[Note: end of backward] Autograd has no hook for it; the first hook of a pass queues a callback on the engine. A pass
whose callback never ran has failed: what it brought is dropped.

[Note: recomputation] Activation checkpointing runs forwards inside backward. They are recognised by the engine's
current task, gather what they need, and free nothing.

[Note: passes that bring no gradients] `torch.autograd.grad` differentiates without accumulating. Such a pass gathers
like any other, and reduces nothing: the engine shows whether it will reach a parameter.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerokit.errors import ScheduleError, UsageError
from zerokit.runtime.announce import Announcements
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.gathering import Gathering
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.hooks import (
    Hook,
    follow,
    in_backward,
    origin,
    outside_transforms,
    require_no_graphs,
    tensors_in,
    transforming,
)
from zerokit.runtime.model import Anatomy, KnownParameters
from zerokit.runtime.precision import LossScale, Precision, cast_inputs, modules_that_cast
from zerokit.runtime.schedule import ForwardPass, Passes
from zerokit.runtime.sharded import ShardedGathering
from zerokit.runtime.storage import UnitState


class ModelWalk:
    """Where the model is: in forward, in backward, or between. Guards its parameters between passes."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        storages: list[UnitState],
        gathering: Gathering,
        gradients: Gradients,
        collectives: Collectives,
        precision: Precision,
    ) -> None:
        self._storages = storages
        self._gradients = gradients
        self._collectives = collectives
        self._precision = precision
        self._device = collectives.device.type
        self.gathering = gathering
        self._sharded = isinstance(gathering, ShardedGathering)
        self._passes = Passes()
        self._in_forward = False
        self._task: int | None = None
        self._accumulates = False
        self._keeps_graph = False
        """Whether the backward pass under way makes a graph of its own (create_graph)."""
        self._had_gradients = False
        self.gradient_scale = 1.0
        """The factor of the loss that the gradients held now come from."""
        self._early: list[int] | None = None
        self._given: dict[nn.Module, set[tuple[object, int]]] = {}
        """Where the inputs of modules at work come from."""
        self._known = KnownParameters(model)
        # In fp32 nothing is cast: inputs of another dtype are refused by PyTorch as they are without zerokit.
        casts = precision.cast_inputs and precision.compute != torch.float32
        self._casting = modules_that_cast(model) if casts else set()
        self._modules = Announcements(model, anatomy, storages, self._casting)
        self._install(model)
        me: weakref.ref[Any] = weakref.ref(self)
        for storage in storages:
            storage.renormed = frozenset(
                position
                for position, layout in enumerate(storage.unit.parameters)
                if all(getattr(owner, "max_norm", None) is not None for owner in anatomy.owners[layout.name])
            )
            storage.issue_tickets(me)
            storage.guard()

    # ---- hooks

    def _install(self, model: nn.Module) -> None:
        me = weakref.ref(self)
        before_root = Hook(me, ModelWalk._before_root)
        model.register_forward_pre_hook(before_root, with_kwargs=True, prepend=True)
        model.register_forward_hook(Hook(me, ModelWalk._after_root))
        self._modules.install(me, ModelWalk._before_unit, ModelWalk._after_unit, ModelWalk._cast)
        for storage in self._storages:
            if storage.unit.trainable:
                for position, weight in enumerate(storage.parameters):
                    hook = Hook(me, ModelWalk._on_gradient, storage.unit.index, position)
                    weight.register_post_accumulate_grad_hook(hook)

    def read(self, unit: int, name: str) -> None:
        """A parameter is used outside the modules that announce it."""
        recomputing = in_backward()
        with outside_transforms():
            self.gathering.read(unit, name, in_forward=self._in_forward, in_backward=recomputing)
        if self._in_forward or recomputing:
            self._passes.elsewhere.add(unit)

    def has_gradient(self, unit: int, positions: Iterable[int]) -> bool:
        return not in_backward() and any(self._gradients.holds(unit, position) for position in positions)

    def clear_gradient(self, unit: int, positions: Iterable[int]) -> None:
        for position in positions:
            if self._gradients.holds(unit, position):
                self._gradients.clear(unit, position)

    # ---- forward

    def _before_root(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if in_backward():
            return self._cast(module, args, kwargs)
        if self._task is not None:
            self.abandon()
        if self._in_forward:
            self.gathering.free_all()  # the last forward ended in an exception
        self._known.require_same(module)
        if not self.gathering.recorded:
            self._modules.spare_compilers(module)
            if self._sharded and self._device == "cuda":
                require_no_graphs(module)
        self._in_forward = True
        self._given.clear()
        self._passes.begin(training=torch.is_grad_enabled())
        self.absorb_changes()
        if torch.is_autocast_enabled(self._device):
            # Weights cast in an earlier forward would receive their gradients after everything of this one, and both
            # forwards' would be added in half precision where the weight stays: equal bits at all stages need neither.
            torch.clear_autocast_cache()
        with outside_transforms():
            self.gathering.begin_forward(self._passes.current)
        for storage in self._storages:
            if not storage.guarded:
                storage.check()
            if storage.stopped and torch.is_grad_enabled():
                self._gradients.note_frozen(storage)
        return self._cast(module, args, kwargs)

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> Any:
        if in_backward():
            return None
        if isinstance(output, types.GeneratorType):
            return follow(output, self._watch_outputs, partial(self.end_generator, self._passes.current))
        self._watch_outputs(output)
        self._end_forward()
        return None

    def _watch_outputs(self, output: Any) -> None:
        if torch.is_grad_enabled() and not transforming():
            hook = Hook(weakref.ref(self), ModelWalk._on_output_gradient, [], self._passes.current, None)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(hook)

    def _end_forward(self) -> None:
        with outside_transforms():
            self.gathering.end_forward(training=torch.is_grad_enabled())
            if not self.gathering.recorded or self.gathering.deviated:
                self._record_forward()
        self._in_forward = False

    def end_generator(self, current: ForwardPass) -> None:
        """A generator that forward returned is exhausted, or closed."""
        if current is self._passes.current and self._in_forward and not in_backward():
            self._end_forward()

    def _before_unit(
        self, units: list[UnitState], module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        if in_backward():
            if units:
                self._begin_backward(None)
                self.gathering.enter_backward(units, None, recomputing=True)
            return self._cast(module, args, kwargs)
        if not self.gathering.recorded:
            self._modules.called.add(module)
        elif not self._sharded:
            for unit in units:
                if unit.guarded:  # on its way, where its owners have updated it
                    self.gathering.enter_aside(unit)
            return self._cast(module, args, kwargs)
        if self._in_forward:
            for unit in units:
                self._passes.current.use(unit.unit.index)
        # Inside another module of the same units everything is there, and nothing is to be noted.
        if not all(map(self.gathering.is_active, units)):
            self._enter(units, module, args, kwargs)
        for unit in units:
            self.gathering.activate(unit)
        return self._cast(module, args, kwargs)

    def _enter(self, units: list[UnitState], module: nn.Module, args: Any, kwargs: Any) -> None:
        kept = self.gathering.kept
        around = [unit for unit in self.gathering.active_units() if unit.unit.index not in kept]
        inner = [unit for unit in units if unit.unit.index not in kept]
        if around and inner and self._sharded:
            # Backward will come to the units around both before and after this one.
            for unit in (*around, *inner):
                self.gathering.pin(unit)
                self._passes.elsewhere.add(unit.unit.index)
        with outside_transforms():
            for unit in units:
                if self._in_forward:
                    self.gathering.enter(unit)
                else:
                    self._passes.elsewhere.add(unit.unit.index)
                    self.gathering.enter_aside(unit)
        if self._sharded and torch.is_grad_enabled():
            given = tensors_in((args, kwargs) if kwargs else args)
            self._given[module] = {origin(tensor) for tensor in given}

    def _after_unit(self, units: list[UnitState], module: nn.Module, args: Any, output: Any) -> None:
        if not units or in_backward():
            return
        outermost = [unit for unit in units if self.gathering.leave(unit)]
        given = self._given.pop(module, set())
        if not self._sharded or not outermost or not torch.is_grad_enabled():
            return
        tensors = list(tensors_in(output))
        if not tensors or transforming():
            # Nothing that a hook could watch: what backward reads of these units must stay until it ends.
            for unit in outermost:
                self.gathering.pin(unit)
                self._passes.elsewhere.add(unit.unit.index)
            return
        current = self._passes.current if self._in_forward else self._passes.aside
        uses = current.uses if any(unit.unit.index not in self.gathering.kept for unit in outermost) else None
        hook = Hook(weakref.ref(self), ModelWalk._on_output_gradient, outermost, current, uses)
        for tensor in tensors:
            # What is handed through (T5's position bias) receives its gradient in an earlier unit's backward.
            if tensor.requires_grad and origin(tensor) not in given:
                tensor.register_hook(hook)
                current.watched.update(unit.unit.index for unit in outermost)

    def _cast(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if module not in self._casting:
            return None
        return cast_inputs(args, kwargs, self._precision.compute, self._device)

    def _record_forward(self) -> None:
        """Adopt rank 0's order of units; see schedule's [Note: one order]."""
        gathering, broadcast = self.gathering, self._collectives.broadcast_list
        lazy = sorted(gathering.lazy)
        if not gathering.recorded:
            lazy = self._modules.lazy_units()
        order = broadcast(gathering.trace(lazy))
        gathering.adopt_order(order, broadcast(lazy), broadcast(gathering.used_anywhere()))
        if self._passes.current.plan is not None:
            self._passes.current.plan = gathering.plan
        self._modules.drop_spare(after=not self._sharded)

    def absorb_changes(self) -> None:
        """Take over what the user has changed in place since the last pass, or the opening of `gathered()`."""
        for storage in self._storages:
            # Where parameters are divided, they can be changed while they are shown, and nowhere else.
            apart = self.gathering.is_open if self._sharded else storage.separate
            if apart and storage.changed:
                storage.complete()
                storage.read_in()

    # ---- backward

    def _on_output_gradient(
        self, units: list[UnitState], current: ForwardPass, uses: int | None, gradient: Tensor
    ) -> None:
        self._begin_backward(current)
        if current is not self._passes.aside and not torch._C._autograd._get_current_graph_task_keep_graph():
            current.consumed |= self._accumulates
        if not self._sharded:
            return
        if torch.is_grad_enabled():
            self._keeps_graph = True
            self.gathering.hold()
        scoped = [unit.unit.index for unit in units if unit.unit.index not in self.gathering.kept]
        if scoped and self._early is None:
            self._early = self._gradients.complete_units()
        self._gradients.over = self._passes.when_over(current, uses, accumulates=self._accumulates)
        self.gathering.enter_backward(units, current)

    def _on_gradient(self, index: int, position: int, parameter: nn.Parameter) -> None:
        if self._task is None:
            self._begin_backward(None)
        self._gradients.accept(index, position, parameter)

    def _begin_backward(self, current: ForwardPass | None) -> None:
        if self._task is not None:
            return
        self._accumulates = self._gradients.will_arrive()
        if self._accumulates:
            self._note_scale()
        self._task = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(
            Hook(weakref.ref(self), ModelWalk._end_backward)
        )
        self._had_gradients = self._gradients.received
        self._early, self._keeps_graph = None, False
        self._start_backward(current)

    def _note_scale(self) -> None:
        """Gradients keep the scale of the loss that they come from, whichever optimizer's `backward` it is."""
        scale = LossScale.current
        if self._precision.scaled and scale is None:
            raise UsageError(
                "fp16 gradients underflow without loss scaling: call optimizer.backward(loss), not loss.backward()"
            )
        if self._gradients.received and self.gradient_scale != (scale or 1.0):
            raise UsageError(
                f"this backward brings gradients of a loss scaled by {scale or 1.0:g} to an optimizer that holds "
                f"others scaled by {self.gradient_scale:g}: call its zero_grad() or step() in between, or sum the "
                "losses and call backward() of one optimizer"
            )
        self.gradient_scale = scale or 1.0

    def _start_backward(self, current: ForwardPass | None) -> None:
        plan = self.gathering.plan if current is None or current.plan is None else current.plan
        if plan is not None:
            self._gradients.follow(plan.reductions)
        self._gradients.over = lambda unit: False
        self.gathering.begin_backward()

    def _end_backward(self) -> None:
        accumulated, self._task = self._accumulates, None
        gathering, gradients = self.gathering, self._gradients
        latest = self._passes.latest(planned=True)
        if not accumulated:
            if not self._in_forward:
                gathering.end_backward(latest)
                gathering.free_all()
            return
        gradients.over = lambda unit: True
        gathering.end_backward(latest)
        gradients.end_backward()
        if not gradients.recorded and not gradients.accumulating:
            self._record_backward(latest)
        if not self._keeps_graph:
            gathering.drop()
        gathering.free_all()
        self._passes.end_backward()

    def _record_backward(self, latest: ForwardPass | None) -> None:
        gradients, gathering = self._gradients, self.gathering
        if not isinstance(gathering, ShardedGathering):
            gradients.adopt_order(self._collectives.broadcast_list(gradients.completed_order()))
            return
        gradients.recorded = True
        candidates = [
            i for i in sorted(gathering.kept & gathering.lazy, reverse=True) if i in gradients.units
        ]
        if candidates and gathering.plan.gathers:
            early = [
                i in (self._early or ()) or (latest is not None and not latest.used(i)) for i in candidates
            ]
            agreed = torch.tensor(early, dtype=torch.int64, device=self._collectives.device)
            self._collectives.all_reduce(agreed, dist.ReduceOp.MIN)
            gathering.adopt_early(
                [i for i, yes in zip(candidates, self._collectives.read(agreed), strict=True) if yes]
            )

    def finish(self) -> None:
        """Before a step: take part in reductions that only other ranks have needed so far.

        Raises `ScheduleError` when a backward pass ended in an exception and its gradients are mixed with earlier ones.
        """
        if self._task is not None:
            raise ScheduleError(
                "the last backward pass did not finish, so its gradients are incomplete: call zero_grad(), then run "
                "forward and backward again"
            )
        if self._gradients.spoiled:
            raise ScheduleError(
                "a backward pass failed after others had brought gradients, which are mixed with its own now: call "
                "zero_grad(), then run all micro-batches of this step again"
            )
        for storage in self._storages:
            storage.note_requires_grad()
        if self._passes.unanswered or self._gradients.pending or not self._gradients.summed:
            self._accumulates, self._keeps_graph = True, False
            self._start_backward(self._passes.latest())
            self._end_backward()
        self._passes.clear()
        self.gathering.drop()

    def abandon(self) -> None:
        """Forget an unfinished pass; gradients of earlier ones cannot be separated from its own."""
        self._gradients.forget()
        self._gradients.spoiled = self._had_gradients
        self.gathering.drop()
        self.gathering.free_all()
        self._task, self._in_forward, self._passes.unanswered = None, False, False
        self._passes.clear()

    @property
    def failed(self) -> bool:
        return self._task is not None and not in_backward()
