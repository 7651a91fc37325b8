"""Follows a model's forward and backward passes by hooks, and tells gathering and gradients where they are.

The hooks hold weak references only, so that deleting the model and the optimizer frees their memory.

[Note: end of backward] Autograd has no hook for it; the first hook of a pass queues a callback on the engine. A pass
whose callback never ran has failed: what it brought is dropped.

[Note: recomputation] Activation checkpointing runs forwards inside backward. They are recognised by the engine's
current task, gather what they need, and free nothing.

[Note: passes that bring no gradients] `torch.autograd.grad` differentiates without accumulating. Such a pass gathers
like any other, and reduces nothing: the engine tells whether it will reach a parameter.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Generator, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zerokit.errors import ScheduleError, UsageError
from zerokit.runtime.casting import cast_inputs, modules_that_cast
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.gathering import Gathering
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.hooks import Hook, in_backward, outside_transforms, registrations, transforming
from zerokit.runtime.modules import Anatomy, announcers
from zerokit.runtime.outputs import origin, tensors_in
from zerokit.runtime.passes import ForwardPass
from zerokit.runtime.precision import Precision
from zerokit.runtime.sharded import ShardedGathering
from zerokit.runtime.storage import FlatUnit


class ModelWalk:
    """Where the model is: in forward, in backward, or between. Guards its parameters between passes."""

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        storages: list[FlatUnit],
        gradients: Gradients,
        collectives: Collectives,
        *,
        precision: Precision,
        stage: int,
    ) -> None:
        self._storages = storages
        self._gradients = gradients
        self._collectives = collectives
        self._precision = precision
        self._device = collectives.device.type
        self.gathering = (
            ShardedGathering(storages, collectives, reduce_due=gradients.reduce_due, allow=gradients.allow)
            if stage == 3
            else Gathering(storages, collectives, owners_update=stage > 0)
        )
        self._sharded = stage == 3
        self._pass = ForwardPass()
        self._open_passes: list[ForwardPass] = []
        """Forward passes with gradients since the last step that no backward has come through."""
        self._unanswered = False
        """Whether a forward pass with gradients has no backward yet."""
        self._aside = ForwardPass()
        """Modules called by themselves, outside any forward of the model."""
        self._elsewhere: set[int] = set()
        """Units used where no hook tells when backward is done with them."""
        self._in_forward = False
        self._task: int | None = None
        self._accumulates = False
        self._keeps_graph = False
        """Whether the backward pass under way makes a graph of its own (create_graph)."""
        self._had_gradients = False
        self.scaling = False
        """Whether a scaled loss is being differentiated."""
        self._early: list[int] | None = None
        self._called: set[nn.Module] = set()
        self._given: dict[nn.Module, set[tuple[object, int]]] = {}
        """Where the inputs of modules at work come from."""
        self._registrations = registrations()
        self._known = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        self._leaves: dict[tuple[int, int], Any] = {}
        """Autograd's accumulating node of each trainable parameter, where one has been asked for."""
        self._announcers = announcers(model, anatomy, [storage.unit for storage in storages])
        self._casting = modules_that_cast(model) if precision.cast_inputs else set()
        self._handles: list[RemovableHandle] = []
        self._install(model, anatomy)
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

    def _install(self, model: nn.Module, anatomy: Anatomy) -> None:
        me = weakref.ref(self)
        register = self._handles.append
        register(
            model.register_forward_pre_hook(Hook(me, ModelWalk._before_root), with_kwargs=True, prepend=True)
        )
        register(model.register_forward_hook(Hook(me, ModelWalk._after_root)))
        users: dict[nn.Module, list[FlatUnit]] = {module: [] for module in self._casting - {model}}
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
                    Hook(me, ModelWalk._before_unit, units), with_kwargs=True, prepend=True
                )
            )
            register(module.register_forward_hook(Hook(me, ModelWalk._after_unit, units)))
        for storage in self._storages:
            if storage.unit.trainable:
                for position, weight in enumerate(storage.parameters):
                    hook = Hook(me, ModelWalk._on_gradient, storage.unit.index, position)
                    register(weight.register_post_accumulate_grad_hook(hook))

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    # ---- guarding parameters between passes

    def read(self, unit: int, name: str) -> None:
        """Somebody uses a parameter outside the modules that announce it."""
        recomputing = in_backward()
        with outside_transforms():
            self.gathering.read(unit, name, in_forward=self._in_forward, in_backward=recomputing)
        if self._in_forward or recomputing:
            self._elsewhere.add(unit)

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
        self._refuse_foreign(module)
        self._in_forward = True
        self._given.clear()
        self._pass = ForwardPass()
        if torch.is_grad_enabled():
            self._open_passes.append(self._pass)
            self._unanswered = True
        self.absorb_changes()
        if self._sharded and torch.is_autocast_enabled(self._device):
            # Weights cast in an earlier forward would receive their gradients after everything of this one.
            torch.clear_autocast_cache()
        with outside_transforms():
            self.gathering.begin_forward(self._pass)
        for storage in self._storages:
            if not storage.guarded:
                storage.check()
            if storage.stopped and torch.is_grad_enabled():
                self._gradients.note_frozen(storage)
        return self._cast(module, args, kwargs)

    def _refuse_foreign(self, module: nn.Module) -> None:
        """Raise `UsageError` where parameters have come, gone or changed their names since construction."""
        if self._registrations == registrations():
            return
        # torch.func.functional_call puts plain tensors in the places of parameters.
        named: Iterable[tuple[str, Any]] = module.named_parameters(remove_duplicate=False)
        foreign = [
            name for name, p in named if isinstance(p, nn.Parameter) and self._known.get(name) != id(p)
        ]
        if foreign:
            raise UsageError(
                f"{', '.join(foreign)}: not in the model when ZeroOptimizer was built (a module or parameter was "
                "added, replaced, renamed or tied), so nothing would update or save it rightly: change the model "
                "before, or build the optimizer anew"
            )
        self._registrations = registrations()

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> Any:
        if in_backward():
            return None
        if isinstance(output, types.GeneratorType):
            return _follow(output, self, self._pass)
        self._watch_outputs(output)
        self._end_forward()
        return None

    def _watch_outputs(self, output: Any) -> None:
        if torch.is_grad_enabled() and not transforming():
            hook = Hook(weakref.ref(self), ModelWalk._on_output_gradient, [], self._pass)
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
        if current is self._pass and self._in_forward and not in_backward():
            self._end_forward()

    def _before_unit(
        self, units: list[FlatUnit], module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        if in_backward():
            if units:
                self._begin_backward(None)
                self.gathering.enter_backward(units, None, recomputing=True)
            return self._cast(module, args, kwargs)
        if not self.gathering.recorded:
            self._called.add(module)
        for unit in units:
            if self._in_forward:
                self._pass.use(unit.unit.index)
        # Inside another module of the same units everything is there, and nothing is to be noted.
        if not all(map(self.gathering.is_active, units)):
            self._enter(units, module, args, kwargs)
        for unit in units:
            self.gathering.activate(unit)
        return self._cast(module, args, kwargs)

    def _enter(self, units: list[FlatUnit], module: nn.Module, args: Any, kwargs: Any) -> None:
        kept = self.gathering.kept
        around = [unit for unit in self.gathering.active_units() if unit.unit.index not in kept]
        inner = [unit for unit in units if unit.unit.index not in kept]
        if around and inner and self._sharded:
            # Backward will come to the units around both before and after this one.
            for unit in (*around, *inner):
                self.gathering.pin(unit)
                self._elsewhere.add(unit.unit.index)
        with outside_transforms():
            for unit in units:
                if self._in_forward:
                    self.gathering.enter(unit)
                else:
                    self._elsewhere.add(unit.unit.index)
                    self.gathering.enter_aside(unit)
        if self._sharded and torch.is_grad_enabled():
            self._given[module] = {origin(tensor) for tensor in tensors_in((args, kwargs))}

    def _after_unit(self, units: list[FlatUnit], module: nn.Module, args: Any, output: Any) -> None:
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
                self._elsewhere.add(unit.unit.index)
            return
        current = self._pass if self._in_forward else self._aside
        hook = Hook(weakref.ref(self), ModelWalk._on_output_gradient, outermost, current)
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
        """Adopt rank 0's order of units; see order's [Note: one order]."""
        gathering, broadcast = self.gathering, self._collectives.broadcast_list
        lazy = sorted(gathering.lazy)
        if not gathering.recorded:
            lazy = [i for i, sets in self._announcers.items() if any(s <= self._called for s in sets)]
        order = broadcast(gathering.trace(lazy))
        gathering.adopt_order(order, broadcast(lazy), broadcast(gathering.used_anywhere()))
        if self._pass.plan is not None:
            self._pass.plan = gathering.plan
        self._called.clear()

    def absorb_changes(self) -> None:
        """Take over what the user has changed in place since the last pass."""
        for storage in self._storages:
            if storage.separate and not storage.sharded and storage.changed:
                storage.complete()
                storage.read_in()

    # ---- backward

    def _on_output_gradient(self, units: list[FlatUnit], current: ForwardPass, gradient: Tensor) -> None:
        self._begin_backward(current)
        if current is not self._aside and not torch._C._autograd._get_current_graph_task_keep_graph():
            current.consumed |= self._accumulates
        if not self._sharded:
            return
        if torch.is_grad_enabled():
            self._keeps_graph = True
            self.gathering.hold()
        scoped = [unit.unit.index for unit in units if unit.unit.index not in self.gathering.kept]
        if scoped and self._early is None:
            self._early = self._gradients.complete_units()
        self._gradients.over = self._when_over(current, scoped)
        self.gathering.enter_backward(units, current)

    def _when_over(self, current: ForwardPass, entered: Collection[int]) -> Callable[[int], bool]:
        """Which units will receive no more gradients in this pass, once outputs of `entered` have theirs."""
        alone = self._accumulates and all(other is current or other.consumed for other in self._open_passes)

        def over(unit: int) -> bool:
            return alone and unit not in self._elsewhere and current.over(unit, entered)

        return over

    def _on_gradient(self, index: int, position: int, parameter: nn.Parameter) -> None:
        self._begin_backward(None)
        self._gradients.accept(index, position, parameter)

    def _begin_backward(self, current: ForwardPass | None) -> None:
        if self._task is not None:
            return
        self._accumulates = self._will_accumulate()
        if self._precision.scaled and not self.scaling and self._accumulates:
            raise UsageError(
                "fp16 gradients underflow without loss scaling: call optimizer.backward(loss), not loss.backward()"
            )
        self._task = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(
            Hook(weakref.ref(self), ModelWalk._end_backward)
        )
        self._had_gradients = self._gradients.received
        self._early, self._keeps_graph = None, False
        self._start_backward(current)

    def _start_backward(self, current: ForwardPass | None) -> None:
        plan = self.gathering.plan if current is None or current.plan is None else current.plan
        if plan is not None:
            self._gradients.follow(plan.reductions)
        self._gradients.over = lambda unit: False
        self.gathering.begin_backward()

    def _will_accumulate(self) -> bool:
        """Whether the engine's current task accumulates a gradient in any parameter."""
        for storage in reversed(self._storages):
            if storage.unit.trainable:
                for position, parameter in enumerate(storage.parameters):
                    if position in storage.stopped:
                        continue
                    node = self._leaves.get((storage.unit.index, position))
                    if node is None:
                        with torch._C.DisableTorchFunctionSubclass():
                            node = torch.autograd.graph.get_gradient_edge(parameter).node
                        self._leaves[storage.unit.index, position] = node
                    try:
                        if torch._C._will_engine_execute_node(node):
                            return True
                    except RuntimeError:  # autograd.grad with respect to this parameter
                        return False
        return False

    def _end_backward(self) -> None:
        accumulated, self._task = self._accumulates, None
        gathering, gradients = self.gathering, self._gradients
        latest = next((one for one in reversed(self._open_passes) if one.plan is not None), None)
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
        self._unanswered = False
        self._open_passes = [one for one in self._open_passes if not one.consumed]
        if not self._open_passes:
            self._elsewhere.clear()

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
            gathering.adopt_early([i for i, yes in zip(candidates, agreed.tolist(), strict=True) if yes])

    def finish(self) -> None:
        """Before a step: take part in reductions that this rank has not had a reason for yet.

        Raises `ScheduleError` when a backward pass ended in an exception and its gradients cannot be told apart.
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
        if self._unanswered or self._gradients.pending or not self._gradients.summed:
            self._accumulates, self._keeps_graph = True, False
            self._start_backward(self._open_passes[-1] if self._open_passes else None)
            self._end_backward()
        self._open_passes.clear()
        self._elsewhere.clear()
        self.gathering.drop()

    def abandon(self) -> None:
        """Forget an unfinished pass; gradients of earlier ones cannot be told apart from what it brought."""
        self._gradients.forget()
        self._gradients.spoiled = self._had_gradients
        self.gathering.drop()
        self.gathering.free_all()
        self._task, self._in_forward, self._unanswered = None, False, False
        self._open_passes.clear()
        self._elsewhere.clear()

    @property
    def failed(self) -> bool:
        return self._task is not None and not in_backward()


def _follow(
    generator: Generator[Any, Any, Any], walk: ModelWalk, current: ForwardPass
) -> Generator[Any, Any, Any]:
    """The generator that the model's forward returned: the forward lasts until it is exhausted."""
    sent: Any = None
    try:
        while True:
            try:
                value = generator.send(sent)
            except StopIteration as end:
                return end.value
            walk._watch_outputs(value)
            sent = yield value
    finally:
        walk.end_generator(current)
