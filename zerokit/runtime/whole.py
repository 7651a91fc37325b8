"""Whole parameters and gradients for their user, and the model's own methods that meet them."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY

from zerokit.errors import UsageError
from zerokit.runtime.buckets import UnitGradients
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.gathering import Gathering
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.guard import TICKET, show_gradient, shown_gradient
from zerokit.runtime.storage import UnitState


@contextmanager
def gathered(storages: Sequence[UnitState], gathering: Gathering) -> Iterator[None]:
    """All parameters whole; on leaving, what was changed in place goes to shards and masters."""
    gathering.open()
    try:
        yield
    finally:
        _take_changes(storages)
        gathering.close()


def _take_changes(storages: Sequence[UnitState]) -> None:
    for storage in storages:
        if storage.changed:
            storage.read_in()


@contextmanager
def gathered_gradients(gradients: Gradients, collectives: Collectives) -> Iterator[None]:
    """Every trainable parameter's `.grad` whole and summed; on leaving, this rank's part of changes is kept.

    They have their parameter's dtype; elements that were not changed keep the precision of the buckets.
    """
    if not collectives.any(gradients.received):
        yield  # as in torch, there are no gradients to see
        return
    shown = [(unit, _show(unit, collectives)) for unit in gradients.units.values()]
    collectives.wait_for_readers()
    gradients.shown = True
    try:
        yield
    finally:
        gradients.shown = False
        for unit, before in shown:
            _take_back(unit, before)


def _show(unit: UnitGradients, collectives: Collectives) -> Tensor:
    """Let the unit's parameters show whole gradients [numel]; returns what was summed."""
    if unit.updated.numel == unit.unit.numel:
        whole = unit.of(unit.updated).clone()
    else:
        whole = torch.zeros(unit.unit.numel, dtype=unit.dtype, device=unit.storage.device)
        whole[unit.storage.own.start : unit.storage.own.stop] = unit.of(unit.storage.own)
        collectives.all_gather(unit.unit, whole).wait()
    for parameter, part in zip(unit.storage.parameters, unit.unit.slices, strict=True):
        piece = whole[part.memory.start : part.memory.stop].view(part.parameter.shape)
        show_gradient(parameter, piece.to(unit.storage.dtype, copy=True))
    return whole


def _take_back(unit: UnitGradients, before: Tensor) -> None:
    for parameter, part in zip(unit.storage.parameters, unit.unit.slices, strict=True):
        gradient = shown_gradient(parameter)
        show_gradient(parameter, None)
        piece = before[part.memory.start : part.memory.stop]
        if gradient is None:
            piece.zero_()
        else:
            flat = gradient.detach().reshape(-1)
            changed = flat != piece.to(flat.dtype)
            piece.copy_(torch.where(changed, flat.to(piece.dtype), piece))
    unit.of(unit.updated).copy_(before[unit.updated.start : unit.updated.stop])


def install_model_methods(
    model: nn.Module,
    storages: Sequence[UnitState],
    gathering: Gathering,
    clear: weakref.WeakMethod[Callable[[], None]],
) -> None:
    """Make the model's own methods behave as without zerokit, or raise an error with advice.

    `state_dict()` gives whole, current tensors and `load_state_dict()` reaches the masters. Both are collective: all
    ranks must call them. At stage 3 both need the whole model in memory, and `state_dict` copies, unit by unit, because
    the gathered memory is freed again. `zero_grad()` also calls `clear`, the optimizer's.
    """
    _install_state_dict(model, storages, gathering)

    me = weakref.ref(model)  # methods of the model's own would keep it alive

    def zero_grad(set_to_none: bool = True) -> None:
        living, clear_gradients = me(), clear()
        if living is not None:
            type(living).zero_grad(living, set_to_none)
        if clear_gradients is not None:
            clear_gradients()

    def apply(function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module | None:
        _require_harmless(function, storages)
        living = me()
        if living is not None:
            with _unguarded(storages):
                type(living)._apply(living, function, *args, **kwargs)
        return living

    model.__dict__["zero_grad"] = zero_grad
    model.__dict__["_apply"] = apply
    model.__dict__["__deepcopy__"] = _refuse_deepcopy
    model.__dict__["__reduce_ex__"] = _refuse_pickling
    # DistributedDataParallel reads it first of all; fully_shard and replicate look into the registry.
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = _NoDistributedDataParallel()
    for module in model.modules():
        module.__dict__[REGISTRY_KEY] = _NoFullyShard(module.__dict__.get(REGISTRY_KEY, ()))


def _install_state_dict(model: nn.Module, storages: Sequence[UnitState], gathering: Gathering) -> None:
    me = weakref.ref(model)

    def state_dict(*args: Any, **kwargs: Any) -> Any:
        living = me()
        if living is None or gathering.is_open:
            return type(living).state_dict(living, *args, **kwargs) if living is not None else {}
        # Every hook and override of the model's modules finds whole weights, whatever it makes of them.
        gathering.open()
        try:
            holders = [_holders(storage) for storage in storages]
            state = type(living).state_dict(living, *args, **kwargs)
            _take_changes(storages)
            for storage, count in zip(storages, holders, strict=True):
                if storage.placement.cuts_parameters:
                    _keep_copies(state, storage, count)
                    storage.free()
        finally:
            gathering.close()
        return state

    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        """The method of transformers, PEFT and diffusers also asks parts of the model for their states."""
        living = me()
        assert living is not None
        # One rank saves what all have gathered, as trainers do.
        given = kwargs.get("state_dict") is not None
        with contextlib.nullcontext() if given else gathered(storages, gathering):
            method: Any = getattr(type(living), "save_pretrained")  # noqa: B009 - no method that nn.Module knows
            return method(living, *args, **kwargs)

    def before_load(
        module: nn.Module, state: Mapping[str, Tensor], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) would put other parameters into the model, which nothing updates: leave "
                "assign=True out, and values are copied"
            )
        gathering.open()

    def after_load(module: nn.Module, incompatible: Any) -> None:
        _take_changes(storages)
        gathering.close()

    def before_load_of_part(module: nn.Module, state: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        if not gathering.is_open and any(True for _ in module.parameters(recurse=False)):
            raise UsageError(
                f"load_state_dict() of {type(module).__name__}, a part of the model, whose parameters stage 3 has "
                "divided over ranks: call it inside `with optimizer.gathered():`, which all ranks enter"
            )

    model.__dict__["state_dict"] = state_dict
    if hasattr(model, "save_pretrained"):
        model.__dict__["save_pretrained"] = save_pretrained
    model.register_load_state_dict_pre_hook(before_load)
    model.register_load_state_dict_post_hook(after_load)
    if any(storage.placement.cuts_parameters for storage in storages):
        for module in model.modules():
            if module is not model:
                module.register_load_state_dict_pre_hook(before_load_of_part)


def _holders(storage: UnitState) -> int:
    """How many tensors refer to the memory of `storage`."""
    return torch._C._storage_Use_Count(storage.whole.untyped_storage()._cdata)


def _keep_copies(state: Any, storage: UnitState, holders: int) -> None:
    """Replace what lies in the memory of `storage`, which is about to be freed, by copies.

    Raises:
        UsageError: where more than `holders` refer to that memory then: in an object that cannot be looked into.
    """
    memory = storage.whole.untyped_storage()

    def lies_there(value: Any) -> bool:
        if isinstance(value, numpy.ndarray):
            return memory.data_ptr() <= value.ctypes.data < memory.data_ptr() + memory.nbytes()
        # A parameter itself (`keep_vars=True`) is guarded again.
        return (
            isinstance(value, Tensor)
            and TICKET not in value.__dict__
            and value.untyped_storage().data_ptr() == memory.data_ptr()
        )

    copies: dict[tuple[Any, ...], Tensor] = {}  # tied weights stay tied

    def copied(value: Any) -> Any:
        if lies_there(value):
            if isinstance(value, numpy.ndarray):
                return value.copy()
            view = value.storage_offset(), value.shape, value.stride(), value.dtype
            if view not in copies:
                copies[view] = value.detach().clone()
            return copies[view]
        if isinstance(value, dict):
            for key, inner in value.items():
                value[key] = copied(inner)
        elif isinstance(value, list):
            value[:] = map(copied, value)
        elif type(value) is tuple:
            return tuple(map(copied, value))
        return value

    copied(state)
    storage.note_versions()  # it held what had been handed out
    if _holders(storage) > holders:
        gc.collect()  # cycles
        if _holders(storage) > holders:
            raise UsageError(
                f"state_dict() of this model keeps views of {storage.unit.name} in an object that is no tensor, array, "
                "dict, list or tuple. Stage 3 frees that memory: put copies there (weight.detach().clone()), or call "
                "state_dict() inside `with optimizer.gathered():` and use it there"
            )


@contextmanager
def _unguarded(storages: Sequence[UnitState]) -> Iterator[None]:
    guarded = [storage for storage in storages if storage.guarded]
    for storage in guarded:
        storage.unguard()
    try:
        yield
    finally:
        for storage in guarded:
            storage.guard()


def _require_harmless(function: Callable[[Tensor], Tensor], storages: Sequence[UnitState]) -> None:
    """Raise `UsageError` where `model.to()` and its like would change the parameters."""
    for storage in storages:
        probe = torch.empty(0, dtype=storage.dtype, device=storage.device)
        made = function(probe)
        if made.dtype != probe.dtype or made.device != probe.device:
            raise UsageError(
                f".to(), .float(), .half() and similar calls would move the parameters out of zerokit's storage, to "
                f"{made.dtype} on {made.device} from {probe.dtype} on {probe.device}: call them before ZeroOptimizer "
                "is built, or choose precision="
            )


def _refuse_deepcopy(memo: object) -> NoReturn:
    raise UsageError(
        "deepcopy of a model under ZeroOptimizer would copy empty or shared "
        "storages: copy it before, or take its state_dict()"
    )


def _refuse_pickling(protocol: object) -> NoReturn:
    raise UsageError(
        "a model under ZeroOptimizer cannot be pickled, its parameters are divided over ranks: save "
        "model.state_dict(), which all ranks call, or use zerokit.save()"
    )


class _NoDistributedDataParallel:
    """Raises an error when it is iterated over."""

    def __iter__(self) -> Iterator[str]:
        raise UsageError(
            "this model is under ZeroOptimizer, which reduces its gradients itself: leave DistributedDataParallel out "
            "and call the model as it is (with accelerate, zerokit.integrations.accelerate.ZeroAccelerator does so)"
        )


class _NoFullyShard(dict[str, Any]):
    """torch's note of what has been applied to a module; refuses what would divide it again."""

    def __contains__(self, name: object) -> bool:
        if name in ("fully_shard", "replicate"):
            raise UsageError(
                f"this model is under ZeroOptimizer, which divides it already: leave {name}() out, or leave "
                "ZeroOptimizer out and pass its parameters to a torch optimizer"
            )
        return super().__contains__(name)
