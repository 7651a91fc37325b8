"""Hooks that PyTorch calls while a model runs, their tensors, and ranges for its profiler."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zerokit.errors import ScheduleError, UsageError
from zerokit.layout import Unit
from zerokit.runtime.torch_internals import NO_CONTEXT, compiles_backward, leaves_of, profiling, uncompiled


class Hook:
    """A method with its first arguments, for PyTorch to call; does nothing once the object is gone."""

    __slots__ = ("_arguments", "_method", "_target")

    def __init__(self, target: weakref.ref[Any], method: Callable[..., Any], *arguments: Any) -> None:
        self._target, self._method, self._arguments = target, method, arguments

    def run(self, *args: Any) -> Any:
        target = self._target()
        return None if target is None else self._method(target, *self._arguments, *args)

    __call__ = uncompiled(run)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _ignore  # a copied module is a plain one

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a module under ZeroOptimizer cannot be pickled, its parameters may be sharded across ranks: save its "
            "state_dict(), inside `with optimizer.gathered():` where all ranks enter, or use zerokit.save()"
        )


class TracedHook(Hook):
    """A hook on tensors alone, which compilers include in their graphs."""

    __slots__ = ()
    __call__ = Hook.run


def require_no_graphs(model: nn.Module) -> None:
    """Raise `UsageError` for parts compiled with CUDA graphs, which replay addresses that parameters may have left."""
    for name, module in model.named_modules():
        held = (one for one in vars(module).values() if isinstance(one, types.FunctionType))
        asked = [one.get_compiler_config() for one in held if hasattr(one, "get_compiler_config")]
        if any((config or {}).get("triton.cudagraphs") for config in asked):
            raise UsageError(
                f"{name or 'the model'} is compiled with CUDA graphs, which are recorded for one address of each "
                "parameter; stage 3 frees their memory between uses: compile it with mode='default' or "
                "'max-autotune-no-cudagraphs', or train at stage 0, 1 or 2"
            )


def _ignore(*args: Any) -> None:
    pass


@functools.cache
def registrations() -> list[int]:
    """How many times a module of this process was assigned a parameter or a module since the first call, in a list."""
    count = [0]

    def note(*registered: Any) -> None:
        count[0] += 1

    register_module_parameter_registration_hook(note)
    register_module_module_registration_hook(note)
    return count


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


_DEPTH = 4
"""Objects within objects: outputs are no deeper, and what lies deeper (a configuration, say) holds no outputs."""


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Every tensor in nested containers, dataclasses and plain objects."""
    if isinstance(value, Tensor):  # what most modules take and return
        return (value,)
    if type(value) is tuple and all(isinstance(one, Tensor) for one in value):
        return value
    return _search(value, set(), _DEPTH)


def _search(value: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    for leaf in leaves_of(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif not isinstance(leaf, (*_PLAIN, type, nn.Module)) and id(leaf) not in seen and depth:
            seen.add(id(leaf))
            names = [name for cls in type(leaf).__mro__ for name in getattr(cls, "__slots__", ())]
            members = [getattr(leaf, name, None) for name in names if isinstance(name, str)]
            for inner in () if callable(leaf) else [*members, *getattr(leaf, "__dict__", {}).values()]:
                yield from _search(inner, seen, depth - 1)


def tensors_kept(attribute: Any) -> list[Tensor]:
    """The tensors of an attribute that is one, or holds some in a plain container."""
    if not isinstance(attribute, Tensor | list | tuple | dict):
        return []
    return [leaf for leaf in leaves_of(attribute) if isinstance(leaf, Tensor)]


def announced(tensor: Tensor) -> bool:
    """Whether a hook announces the gradient of `tensor` already."""
    return any(isinstance(hook, Hook) for hook in (tensor._backward_hooks or {}).values())


def origin(tensor: Tensor) -> tuple[object, int]:
    """The autograd node that made `tensor`: equal for all tensors that autograd treats as the same."""
    return (id(tensor), 0) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def profiled(what: str, unit: Unit | None = None) -> AbstractContextManager[object]:
    """A profiler range `zerokit: WHAT UNIT` around a block; without a profiler it only checks a flag."""
    if not profiling():
        return NO_CONTEXT
    return profiler.record_function(f"zerokit: {what}" if unit is None else f"zerokit: {what} {unit.name}")


def differentiate(
    loss: Tensor, *, retain_graph: bool | None, create_graph: bool, frees_weights: bool
) -> None:
    """Run `loss.backward()`, and explain what fails in it where a runtime `frees_weights` between passes."""
    if compiles_backward():
        raise UsageError(
            "compiled autograd runs backward on tensors without values, which cannot be reduced: keep "
            "torch._dynamo.config.compiled_autograd off, and compile the model or its blocks (with their backward)"
        )
    try:
        loss.backward(retain_graph=retain_graph, create_graph=create_graph)
    except RuntimeError as error:
        if frees_weights and "modified by an inplace operation" in str(error):
            raise ScheduleError(
                f"{error} At stage 3 this is also the error for a weight that backward reads where no output or "
                "attribute of its unit leads to it: name the module that reads it in units=, run forward and backward "
                "inside `with optimizer.gathered():`, or train at stage 2"
            ) from error
        raise
