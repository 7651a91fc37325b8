"""The reactions to PyTorch's hooks: the engine and gradients follow the forward and backward passes.

Hooks hold weak references only. Units are announced by calls of their own modules, the rest by the modules that hold
its weights; guarded parameters notice uses past these.

[Note: end of backward] Autograd has no hook for it; the first hook of a pass queues a callback on the engine. A pass
whose callback never ran has failed: what it brought is dropped.

[Note: recomputation] Activation checkpointing runs forwards inside backward. They are recognised by the engine's
current task, gather what they need, and free nothing.

[Note: passes that bring no gradients] `torch.autograd.grad` gathers like any other pass, and reduces nothing: the
engine shows whether it will reach a parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.errors import ScheduleError
from zerokit.runtime.buckets import UnitGradients
from zerokit.runtime.casts import cast_inputs, casting
from zerokit.runtime.engine import Engine
from zerokit.runtime.guard import Owner
from zerokit.runtime.hooks import (
    Hook,
    TracedHook,
    announced,
    origin,
    registrations,
    require_no_graphs,
    tensors_in,
    tensors_kept,
)
from zerokit.runtime.model import Anatomy, announcers, parameter_ids, require_known, require_unwrapped
from zerokit.runtime.passes import BackwardPass, ForwardPass
from zerokit.runtime.precision import Precision
from zerokit.runtime.torch_internals import (
    at_end_of_backward,
    excluded_from_graphs,
    in_backward,
    keeps_graph,
    outside_transforms,
    share_memory,
    transforming,
)
from zerokit.runtime.unit import UnitState

_UNKNOWN = (None,)
WALK = "_zerokit_walk"
"""The attribute of a model that keeps its walk, without which nothing would gather its weights (stage 3)."""


class _GradientHook(Hook):
    """Takes a parameter's gradient. A step calls one for each, and most gradients need only be noted."""

    __slots__ = ("_unit",)

    def __init__(self, walk: weakref.ref[ModelWalk], unit: UnitGradients, position: int) -> None:
        super().__init__(walk, ModelWalk._on_gradient, unit.unit.index, position)
        self._unit = weakref.ref(unit)

    @excluded_from_graphs
    def __call__(self, parameter: nn.Parameter) -> None:
        unit = self._unit()
        if unit is None or not unit.collect(self._arguments[1], parameter):
            Hook.__call__(self, parameter)


class ModelWalk(Owner):
    """The model's position: in forward, in backward, or between; its guarded parameters ask what they may."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, engine: Engine, precision: Precision) -> None:
        self.units, self._engine, self._gradients = engine.units, engine, engine.gradients
        self._passes = engine.passes
        self._precision, self._device = precision, self.units[0].device.type
        self._in_forward = False
        self._given: dict[nn.Module, set[tuple[object, int]]] = {}
        """Where the inputs of modules at work come from."""
        self._attributes: dict[nn.Module, list[tuple[dict[str, Any], str]]] = {}
        """Where modules and those inside have left tensors with a graph, such as a loss of their own."""
        self._known, self._registrations = parameter_ids(model), registrations()[0]
        self._casting = casting(model, precision)
        self._me = me = weakref.ref(self)
        owner: weakref.ref[Owner] = weakref.ref(self)
        self.announcers = announcers(model, anatomy, [unit.unit for unit in self.units])
        before, after = Hook(me, ModelWalk._before_root), Hook(me, ModelWalk._after_root)
        self.hooks = [
            model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            model.register_forward_hook(after),
        ]
        self._frees = any(unit.comes_and_goes for unit in self.units)
        self._called: set[nn.Module] = set()  # modules that have been called until an order was recorded
        users: dict[nn.Module, list[UnitState]] = {
            module: [] for module in self._casting if module is not model
        }
        for unit in self.units:
            for used in self.announcers[unit.index] - {model}:
                users.setdefault(used, []).append(unit)
        for used, their in users.items():
            # What graphs see of a module itself would have each block compiled anew.
            dtype = self._casting.get(used)
            before = (
                Hook(me, ModelWalk._before_unit, their)
                if their
                else TracedHook(me, ModelWalk._cast_to, dtype)
            )
            self.hooks.append(used.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            if self._frees and their:
                after = Hook(me, ModelWalk._after_unit, their)
                self.hooks.append(used.register_forward_hook(after))
        for unit in self.units:
            for position, weight in enumerate(unit.parameters if unit.unit.trainable else ()):
                hook = _GradientHook(me, self._gradients.units[unit.index], position)
                self.hooks.append(weight.register_post_accumulate_grad_hook(hook))
            unit.watch(owner)

    # ---- what guarded parameters ask

    def read(self, unit: int, name: str) -> None:
        with outside_transforms():
            self._engine.read(unit, name, in_forward=self._in_forward, in_backward=in_backward())

    def has_gradient(self, unit: int, positions: Iterable[int]) -> bool:
        return not in_backward() and any(self._gradients.holds(unit, position) for position in positions)

    def clear_gradient(self, unit: int, positions: Iterable[int]) -> None:
        for position in positions:
            self._gradients.clear(unit, position)

    def comes_and_goes(self, unit: int) -> bool:
        return self.units[unit].comes_and_goes

    def keeps_address(self, unit: int) -> bool:
        return self.units[unit].keeps_address

    def note_alias(self, unit: int, position: int, alias: Tensor) -> None:
        self.units[unit].note_alias(position, alias)

    def take_exact(self, unit: int, position: int, values: Tensor) -> None:
        self.units[unit].take_exact(position, values)

    def note_requires_grad(self, unit: int) -> None:
        self.units[unit].note_requires_grad()

    # ---- forward

    def _before_root(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if in_backward():
            return self._cast(module, args, kwargs)
        if self._passes.backward is not None:
            self.abandon()
        if self._in_forward:
            self._engine.free_all()  # the last forward ended in an exception
        if self._registrations != registrations()[0]:
            require_known(module, self._known)
            self._registrations = registrations()[0]
        recorded = self._engine.order.from_forward
        if not recorded:
            require_unwrapped(module)
        if self._frees and not recorded and self._device == "cuda":
            require_no_graphs(module)
        self._in_forward = True
        self._given.clear()
        with outside_transforms():
            self._engine.take_changes()
        if torch.is_autocast_enabled(self._device):
            # Weights cast in an earlier forward would receive their gradients after everything of this one, and both
            # forwards' would be added in half precision where the weight stays: equal bits at all stages need neither.
            torch.clear_autocast_cache()
        training = torch.is_grad_enabled()
        with outside_transforms():
            self._engine.begin_forward(training=training)
        for unit in self.units:
            if not unit.guarded:
                unit.note_requires_grad()
        if training:
            self._gradients.note_untrained()
        return self._cast(module, args, kwargs)

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        if torch.is_grad_enabled() and not transforming():
            hook = Hook(self._me, ModelWalk._on_output_gradient, [], self._passes.current, None)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(hook)
        engine = self._engine
        with outside_transforms():
            announced = self.announcers.items() if engine.records else ()
            lazy = {index for index, modules in announced if modules <= self._called}
            engine.end_forward(training=torch.is_grad_enabled(), lazy=lazy)
        self._in_forward = False

    def _before_unit(self, units: list[UnitState], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_backward():
            self._begin_backward()
            self._engine.enter_backward(units)
        elif not self._frees and self._engine.order.from_forward:
            for unit in units:
                if unit.guarded:  # on its way, where its owners have updated it
                    self._engine.enter_aside(unit)
        else:
            if not self._engine.order.from_forward:
                self._called.add(module)
            if self._in_forward:
                for unit in units:
                    self._passes.current.use(unit.index)
            # Inside another module of the same units everything is there, and nothing is to be noted.
            inside = all(unit.active for unit in units)
            for unit in units:
                unit.enter()
            if not inside:
                self._enter(units, module, args, kwargs)
        return self._cast(module, args, kwargs)

    def _enter(self, units: list[UnitState], module: nn.Module, args: Any, kwargs: Any) -> None:
        with outside_transforms():
            if self._in_forward:
                self._engine.enter(units)
            else:
                for unit in units:
                    if torch.is_grad_enabled():
                        self._passes.unwatched.add(unit.index)
                    self._engine.enter_aside(unit)
        if self._frees and torch.is_grad_enabled():
            self._given[module] = {
                origin(tensor) for tensor in tensors_in((args, kwargs) if kwargs else args)
            }

    def _is_left(self, unit: UnitState) -> bool:
        """Whether a pass that comes to other units is done with this one."""
        return unit.index not in self._engine.order.kept

    def _after_unit(self, units: list[UnitState], module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        outermost = [unit for unit in units if self._engine.leave(unit)]
        given = self._given.pop(module, ())
        if not outermost:
            return
        if not self._in_forward:
            self._engine.leave_aside()
        tensors = list(tensors_in(output))
        grad = torch.is_grad_enabled()
        unseen = grad and (not tensors or transforming())
        if self._attributes.get(module, _UNKNOWN):
            tensors += self._left_in(module)
        for unit in outermost:
            # No hook shows when backward, or whoever has a view of a weight, reads this unit for the last time.
            whole = unit.whole.tensor
            if unseen or any(share_memory(tensor, whole) for tensor in tensors):
                self._engine.hold(unit)
        if unseen or not grad:
            return
        current = self._passes.current if self._in_forward else self._passes.aside
        uses = current.uses if any(map(self._is_left, outermost)) else None
        hook = Hook(self._me, ModelWalk._on_output_gradient, outermost, current, uses)
        for tensor in tensors:
            # What is handed through (T5's position bias) receives its gradient in an earlier unit's backward.
            if tensor.requires_grad and origin(tensor) not in given:
                tensor.register_hook(hook)
                for unit in outermost:
                    current.watched.add(unit.index)

    def _left_in(self, module: nn.Module) -> list[Tensor]:
        """What this forward of `module` has left in attributes, where its first one with gradients did so."""
        if module not in self._attributes and torch.is_grad_enabled():
            self._attributes[module] = [
                (vars(each), name)
                for each in module.modules()
                for name, value in vars(each).items()
                if any(tensor.grad_fn is not None for tensor in tensors_kept(value))
            ]
        places = self._attributes.get(module, ())
        left = (tensor for held, name in places for tensor in tensors_kept(held.get(name)))
        return [tensor for tensor in left if not announced(tensor)]

    def _cast(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return self._cast_to(self._casting.get(module), module, args, kwargs)

    def _cast_to(
        self, dtype: torch.dtype | None, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        return None if dtype is None else cast_inputs(args, kwargs, dtype, self._device)

    # ---- backward

    def _on_output_gradient(
        self, units: list[UnitState], current: ForwardPass, uses: int | None, gradient: Tensor
    ) -> None:
        backward = self._begin_backward()
        if current is not self._passes.aside and not keeps_graph():
            current.consume(backward.accumulates)
        if torch.is_grad_enabled():
            backward.note_graph()
            self._engine.keep_graph()
        self._engine.enter_backward(units, current, uses)

    def _on_gradient(self, index: int, position: int, parameter: nn.Parameter) -> None:
        self._begin_backward()
        if self._gradients.accept(index, position, parameter):
            self._engine.reductions.note_complete(index)

    def _begin_backward(self) -> BackwardPass:
        """The backward pass under way, which begins now unless it has before."""
        passes = self._passes
        if passes.backward is not None:
            return passes.backward
        accumulates = any(True for _ in self._gradients.reached())
        # First of all: whatever fails from here on, the gradients that it leaves are to be dropped.
        backward = passes.begin_backward(
            self._gradients.reached(), accumulates=accumulates, amid=self._gradients.received
        )
        if accumulates:
            self._gradients.note_loss(scaled=self._precision.scaled)
        at_end_of_backward(Hook(self._me, ModelWalk._end_backward))
        self._engine.begin_backward(accumulates=accumulates)
        return backward

    def _end_backward(self) -> None:
        backward = self._passes.backward
        assert backward is not None
        if backward.accumulates:
            self._engine.end_backward()
            if not backward.makes_graph:
                self._engine.drop()
            self._engine.free_all()
            self._passes.end_backward()
        elif not self._in_forward:
            self._engine.end_backward()
            self._engine.free_all()
        self._passes.leave_backward()

    # ---- between passes

    @property
    def is_amid_pass(self) -> bool:
        """Whether a pass is under way, or a forward pass with gradients has no backward yet."""
        return self._in_forward or self._passes.unanswered or self._passes.backward is not None

    def finish(self) -> None:
        """Take part, before a step, in reductions that only other ranks have needed so far.

        Raises `ScheduleError` when a backward pass ended in an exception and its gradients are mixed with earlier ones.
        """
        if self._passes.backward is not None or self._gradients.mixed:
            raise ScheduleError(
                "a backward pass of this step did not finish, so gradients are incomplete: call zero_grad(), then run "
                "forward and backward of all its micro-batches again"
            )
        for unit in self.units:
            unit.note_requires_grad()
        if self._passes.unanswered or self._gradients.unreduced:
            self._passes.begin_backward((), accumulates=True, amid=self._gradients.received)
            self._engine.begin_backward(accumulates=True)
            self._end_backward()
        self._passes.clear()
        self._engine.drop()

    def forget(self) -> None:
        """Drop all gradients, including those of an unfinished backward pass."""
        if self._passes.backward is not None and not in_backward():
            self.abandon()
        self._gradients.forget()

    def abandon(self) -> None:
        """Abandon an unfinished pass; gradients of earlier passes cannot be separated from its own."""
        backward = self._passes.backward
        self._gradients.forget(mixed=backward is not None and backward.amid)
        self._engine.drop()
        self._engine.free_all()
        self._passes.clear()
        for unit in self.units:  # whose parameters an exception may have left guarded in part
            unit.unguard()
            unit.guard()
        self._passes.leave_backward()
        self._in_forward = False
