"""Follows a model's forward and backward passes by hooks, and tells gathering and gradients where they are.

The hooks hold weak references only, so that deleting the model and the optimizer frees their memory.

[Note: end of backward] Autograd has no hook for it; the first hook of a pass queues a callback on the engine. A pass
whose callback never ran has failed. Its gradients are worthless, and the next forward or `zero_grad` drops them.

[Note: recomputation] Activation checkpointing runs forwards inside backward. They are recognised by the engine's
current task, gather what they need, and free nothing.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zerokit.errors import ScheduleError, UsageError
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.gathering import Gathering
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.modules import Anatomy
from zerokit.runtime.precision import FLOATING
from zerokit.runtime.storage import FlatUnit
from zerokit.runtime.uses import Uses


class ModelWalk:
    """Where the model is: in forward, in backward, or between."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        storages: list[FlatUnit],
        gathering: Gathering,
        gradients: Gradients,
        collectives: Collectives,
        *,
        compute: torch.dtype,
        sharded: bool,
        needs_scaling: bool,
    ) -> None:
        self._storages = storages
        self._gathering = gathering
        self._gradients = gradients
        self._collectives = collectives
        self._compute = compute
        self._sharded = sharded
        self._needs_scaling = needs_scaling
        self._forwards = 0
        """Forward passes with gradients since the last backward."""
        self._in_forward = False
        self._task: int | None = None
        self.scaling = False
        """Whether a scaled loss is being differentiated."""
        self._uses = Uses(storages)
        self._called: set[nn.Module] = set()
        self._given: dict[nn.Module, set[tuple[object, int]]] = {}
        """Where the inputs of modules at work come from."""
        self._known = {id(parameter) for storage in storages for parameter in storage.parameters}
        self._announcers = _announcers(model, anatomy, storages)
        self._handles: list[RemovableHandle] = []
        self._install(model, anatomy)

    # ---- hooks

    def _install(self, model: nn.Module, anatomy: Anatomy) -> None:
        me = weakref.ref(self)
        register = self._handles.append
        register(
            model.register_forward_pre_hook(
                partial(_call, me, ModelWalk._before_root), with_kwargs=True, prepend=True
            )
        )
        register(model.register_forward_hook(partial(_call, me, ModelWalk._after_root)))
        users: dict[nn.Module, list[FlatUnit]] = {}
        modules = dict(model.named_modules())
        for storage in self._storages:
            for scope in storage.unit.scopes:
                users.setdefault(modules[scope], []).append(storage)
            for parameter in storage.unit.parameters:
                for owner in anatomy.owners[parameter.name]:
                    if owner is not model and storage not in users.setdefault(owner, []):
                        users[owner].append(storage)
        for module, units in users.items():
            register(
                module.register_forward_pre_hook(
                    partial(_call, me, ModelWalk._before_unit, units), with_kwargs=True, prepend=True
                )
            )
            register(module.register_forward_hook(partial(_call, me, ModelWalk._after_unit, units)))
        for storage in self._storages:
            if storage.unit.trainable:
                for position, weight in enumerate(storage.parameters):
                    hook = partial(_call, me, ModelWalk._on_gradient, storage.unit.index, position)
                    register(weight.register_post_accumulate_grad_hook(hook))

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    # ---- forward

    def _before_root(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _in_backward():
            return None
        if self._task is not None:
            self.abandon()
        if self._in_forward:
            self._gathering.free_all()  # the last forward ended in an exception
        if not self._known.issuperset(map(id, module.parameters())):
            foreign = [name for name, p in module.named_parameters() if id(p) not in self._known]
            raise UsageError(
                f"{', '.join(foreign)}: not in the model when ZeroOptimizer was built (a module was added or "
                "replaced), so nothing would update it: change the model before, or build the optimizer anew"
            )
        for storage in self._storages:
            storage.check()
        self._in_forward = True
        self._given.clear()
        self._forwards += torch.is_grad_enabled()
        self._uses.begin()
        self._gathering.begin_forward()
        cast = partial(_cast, dtype=self._compute)
        return torch.utils._pytree.tree_map(cast, (args, kwargs))  # type: ignore[no-any-return]

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if _in_backward():
            return
        training = torch.is_grad_enabled()
        if training:
            differentiable = [tensor for tensor in _tensors(output) if tensor.requires_grad]
            for tensor in differentiable:
                tensor.register_hook(partial(_call, weakref.ref(self), ModelWalk._on_output_gradient, []))
            if self._sharded:
                self._uses.end(differentiable)
        self._gathering.end_forward(training=training)
        if not self._gathering.recorded:
            self._record_forward()
        self._in_forward = False

    def _before_unit(self, units: list[FlatUnit], module: nn.Module, args: Any, kwargs: Any) -> None:
        if _in_backward():
            self._begin_backward()
            self._gathering.enter_backward(units, recomputing=True)
            return
        self._called.add(module)
        for unit in units:
            self._uses.enter(unit.unit.index)
            self._gathering.enter(unit)
            self._gathering.activate(unit)
        if self._sharded and torch.is_grad_enabled():
            self._given[module] = {_origin(tensor) for tensor in _tensors((args, kwargs))}

    def _after_unit(self, units: list[FlatUnit], module: nn.Module, args: Any, output: Any) -> None:
        if _in_backward():
            return
        outermost = [unit for unit in units if self._gathering.leave(unit)]
        given = self._given.pop(module, set())
        if self._sharded and outermost and torch.is_grad_enabled():
            for tensor in _tensors(output):
                # What is handed through (T5's position bias) receives its gradient in an earlier unit's backward.
                if tensor.requires_grad and _origin(tensor) not in given:
                    tensor.register_hook(
                        partial(_call, weakref.ref(self), ModelWalk._on_output_gradient, outermost)
                    )

    def _record_forward(self) -> None:
        """Adopt rank 0's order of units; see gathering's [Note: one order]."""
        lazy = [index for index, sets in self._announcers.items() if any(s <= self._called for s in sets)]
        order = self._collectives.broadcast_list(self._gathering.trace(lazy))
        lazy = self._collectives.broadcast_list(lazy)
        self._gathering.adopt_order(order, lazy)
        self._called.clear()

    # ---- backward

    def _on_output_gradient(self, units: list[FlatUnit], gradient: Tensor) -> None:
        self._begin_backward()
        if self._sharded and self._forwards <= 1:
            self._gradients.settle(self._uses.over(units), self._uses.unreachable)
        self._gathering.enter_backward(units)

    def _on_gradient(self, index: int, position: int, parameter: nn.Parameter) -> None:
        self._begin_backward()
        self._gradients.accept(index, position, parameter)

    def _begin_backward(self) -> None:
        if self._task is not None:
            return
        if self._needs_scaling and not self.scaling:
            raise UsageError(
                "fp16 gradients underflow without loss scaling: call optimizer.backward(loss), not loss.backward()"
            )
        self._task = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(
            partial(_call, weakref.ref(self), ModelWalk._end_backward)
        )
        self._gathering.begin_backward()

    def _end_backward(self) -> None:
        self._gradients.end_backward()
        self._gathering.end_backward()
        if not self._gradients.recorded and not self._gradients.accumulating:
            self._gradients.adopt_order(self._collectives.broadcast_list(self._gradients.completed_order()))
        self._task = None
        self._forwards = 0

    def finish(self) -> None:
        """Before a step: take part in reductions that this rank has not had a reason for yet.

        Raises `ScheduleError` when the last backward pass ended in an exception.
        """
        if self._task is not None:
            raise ScheduleError(
                "the last backward pass did not finish, so its gradients are incomplete: call zero_grad(), then run "
                "forward and backward again"
            )
        if self._forwards or self._gradients.pending or not self._gradients.summed:
            self._gathering.begin_backward()
            self._end_backward()

    def abandon(self) -> None:
        """Forget an unfinished pass and all gradients."""
        self._gradients.forget()
        self._gathering.free_all()
        self._task, self._forwards, self._in_forward = None, 0, False

    @property
    def failed(self) -> bool:
        return self._task is not None and not _in_backward()


def _call(reference: weakref.ref[ModelWalk], method: Callable[..., Any], *args: Any) -> Any:
    walk = reference()
    return None if walk is None else method(walk, *args)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.dtype in FLOATING and value.dtype != dtype:
        return value.to(dtype)
    return value


def _origin(tensor: Tensor) -> tuple[object, int]:
    """What made `tensor`: equal for all tensors that autograd takes for the same."""
    return (id(tensor), 0) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def _tensors(output: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers and dataclasses (which pytree does not look into)."""
    for leaf in torch.utils._pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _tensors(getattr(leaf, field.name))


def _announcers(
    model: nn.Module, anatomy: Anatomy, storages: list[FlatUnit]
) -> dict[int, list[set[nn.Module]]]:
    """For each unit, sets of modules: where all of one set are called, none of its weights is used unannounced.

    These are its unit modules, or else the modules that hold its parameters, unless the root holds one itself.
    """
    modules = dict(model.named_modules())
    announcers: dict[int, list[set[nn.Module]]] = {}
    for storage in storages:
        unit = storage.unit
        owners = {module for p in unit.parameters for module in anatomy.owners[p.name]}
        choices = [{modules[scope] for scope in unit.scopes}] if unit.scopes else []
        announcers[unit.index] = choices if model in owners else [*choices, owners]
    return announcers
