"""The model's own methods, adapted to sharded weights or made to raise errors with advice."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.utils._pytree import tree_map

from zerokit.errors import UsageError
from zerokit.runtime.gathering import Gathering
from zerokit.runtime.guard import TICKET, refuse_moving
from zerokit.runtime.unit import UnitState


def install_model_methods(
    model: nn.Module, gathering: Gathering, clear: weakref.WeakMethod[Callable[[], None]]
) -> None:
    """Make the model's methods behave as without zerokit, or raise an error with advice.

    `state_dict()` gives whole, current tensors and `load_state_dict()` reaches the masters; all ranks must call them.
    At stage 3 `state_dict` copies unit by unit, because gathered memory is freed again.
    """
    _install_state_dict(model, gathering)
    plain_zero_grad, plain_apply = _method(model, "zero_grad"), _method(model, "_apply")

    def zero_grad(set_to_none: bool = True) -> None:
        clear_gradients = clear()
        plain_zero_grad(set_to_none)
        if clear_gradients is not None:
            clear_gradients()

    def apply(function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        _require_harmless(function, gathering.units)
        guarded = [unit for unit in gathering.units if unit.guarded]
        for unit in guarded:
            unit.unguard()
        try:
            return plain_apply(function, *args, **kwargs)
        finally:
            for unit in guarded:
                unit.guard()

    model.__dict__.update({"zero_grad": zero_grad, "_apply": apply, "__deepcopy__": _refuse_deepcopy})
    # DistributedDataParallel reads it first of all; fully_shard and replicate look into the registry.
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = _NoDistributedDataParallel()
    for module in model.modules():
        module.__dict__[REGISTRY_KEY] = _NoFullyShard(module.__dict__.get(REGISTRY_KEY, ()))


def _method(model: nn.Module, name: str) -> Callable[..., Any]:
    """A method of the model's class, for what hides it in the model and must not keep the model alive."""
    reference = weakref.ref(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(type(reference()), name)(reference(), *args, **kwargs)

    return call


def _install_state_dict(model: nn.Module, gathering: Gathering) -> None:
    plain_state_dict, plain_load = _method(model, "state_dict"), _method(model, "load_state_dict")

    def state_dict(*args: Any, **kwargs: Any) -> Any:
        if gathering.is_open:
            return plain_state_dict(*args, **kwargs)
        # Every hook and override of the model's modules finds whole weights, whatever it makes of them.
        with gathering.opened():
            state = plain_state_dict(*args, **kwargs)
            gathering.take_changes()
            for unit in gathering.units:
                if unit.comes_and_goes:
                    _keep_copies(state, unit)
                    unit.free()
        return state

    plain_save_pretrained, reference = _method(model, "save_pretrained"), weakref.ref(model)

    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        """The method of transformers, PEFT and diffusers also asks parts of the model for their states."""
        # One rank saves what all have gathered, as trainers do.
        whole, self = kwargs.get("state_dict"), reference()
        assert self is not None
        with gathering.opened() if whole is None else _parts_taken_from(whole, self):
            return plain_save_pretrained(*args, **kwargs)

    def before_load(
        module: nn.Module, state: Mapping[str, Tensor], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) would put other parameters into the model, which nothing updates: "
                "omit assign=True, so that values are copied"
            )
        gathering.open()

    def after_load(module: nn.Module, incompatible: Any) -> None:
        gathering.close(agree=True)

    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        before = gathering.is_open
        try:
            return plain_load(*args, **kwargs)
        finally:
            if gathering.is_open > before:  # an exception in a module's own loading
                gathering.close()

    model.__dict__.update({"state_dict": state_dict, "load_state_dict": load_state_dict})
    if hasattr(model, "save_pretrained"):
        model.__dict__["save_pretrained"] = save_pretrained
    model.register_load_state_dict_pre_hook(before_load)
    model.register_load_state_dict_post_hook(after_load)


@contextlib.contextmanager
def _parts_taken_from(whole: Mapping[str, Any], model: nn.Module) -> Iterator[None]:
    """A context in which `state_dict()` of the model's parts, which one rank alone may call, is of the `whole`."""
    parts = [
        (f"{path}.", vars(part))
        for path, part in model.named_modules()
        if path and "state_dict" not in vars(part)
    ]

    def state_dict(path: str, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        state = {} if destination is None else destination
        state.update({prefix + name[len(path) :]: whole[name] for name in whole if name.startswith(path)})
        return state

    for path, members in parts:
        members["state_dict"] = functools.partial(state_dict, path)
    try:
        yield
    finally:
        for _, members in parts:
            del members["state_dict"]


def _keep_copies(state: dict[str, Any], unit: UnitState) -> None:
    """Replace what lies in the memory of `unit`, which is about to be freed, by copies."""
    memory = unit.whole.untyped_storage()
    start, stop = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    copies: dict[tuple[Any, ...], Tensor] = {}  # tied weights stay tied

    def copied(value: Any) -> Any:
        if isinstance(value, numpy.ndarray):
            return value.copy() if start <= value.ctypes.data < stop else value
        # A parameter itself (`keep_vars=True`) is guarded again.
        if not isinstance(value, Tensor) or TICKET in value.__dict__:
            return value
        if value.untyped_storage().data_ptr() != start:
            return value
        view = value.storage_offset(), value.shape, value.stride(), value.dtype
        if view not in copies:
            copies[view] = value.detach().clone()
        return copies[view]

    state.update({key: tree_map(copied, value) for key, value in state.items()})
    unit.note_versions()  # it held what had been handed out


def _require_harmless(function: Callable[[Tensor], Tensor], units: Sequence[UnitState]) -> None:
    """Raise `UsageError` where `model.to()` and its like would change the parameters."""
    for unit in units:
        probe = torch.empty(0, dtype=unit.dtype, device=unit.device)
        made = function(probe)
        if made.dtype != probe.dtype or made.device != probe.device:
            raise refuse_moving(unit.unit.name, made, probe)


def _refuse_deepcopy(memo: object) -> NoReturn:
    raise UsageError(
        "deepcopy of a model under ZeroOptimizer would copy empty or shared units: copy it before, or take its "
        "state_dict()"
    )


class _NoDistributedDataParallel:
    """Raises an error when it is iterated over."""

    def __iter__(self) -> Iterator[str]:
        raise UsageError(
            "this model is under ZeroOptimizer, which reduces its gradients itself: call the model without "
            "DistributedDataParallel (with accelerate, zerokit.integrations.accelerate.ZeroAccelerator does so)"
        )


class _NoFullyShard(dict[str, Any]):
    """torch's note of what has been applied to a module; refuses what would divide it again."""

    def __contains__(self, name: object) -> bool:
        if name in ("fully_shard", "replicate"):
            raise UsageError(
                f"this model is under ZeroOptimizer, which already shards it: omit {name}(), or omit "
                "ZeroOptimizer and pass its parameters to a torch optimizer"
            )
        return super().__contains__(name)
