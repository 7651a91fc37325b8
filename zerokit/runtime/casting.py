"""Floating-point inputs take the compute dtype where they meet weights.

That is at modules that hold parameters themselves, in a ParameterList too, and leave none to modules inside (Linear,
LayerNorm, a layer of one's own), and at PyTorch's own that do both (MultiheadAttention). What passes through the model
untouched, a timestep or a mask, keeps its dtype until then: 1001 would become 1000 in bfloat16. A module that computes
with parameters of its own beside modules that have some, or with another module's, must cast by itself, as in any
half-precision model: elementwise its results would be float32, and PyTorch refuses products of two dtypes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm

_LISTS = (nn.ParameterList, nn.ParameterDict)

_CASTABLE = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))


def modules_that_cast(model: nn.Module) -> set[nn.Module]:
    """The modules whose inputs meet weights first."""
    casting = set()
    for module in model.modules():
        if isinstance(module, _LISTS):
            continue  # never called: its parameters meet what enters the module around it
        lists = [child for child in module.children() if isinstance(child, _LISTS)]
        others = [child for child in module.children() if not isinstance(child, _LISTS)]
        own = next(module.parameters(recurse=False), None) is not None or _any_parameters(lists)
        inside = _any_parameters(others)
        of_torch = type(module).__module__.startswith("torch.nn.")
        if (own and (of_torch or not inside)) or (is_parametrized(module) and of_torch):
            casting.add(module)
    return casting


def _any_parameters(modules: Iterable[nn.Module]) -> bool:
    return any(True for module in modules for _ in module.parameters())


def cast_inputs(args: Any, kwargs: Any, dtype: torch.dtype, device: str) -> tuple[Any, Any] | None:
    """`args` and `kwargs` with their floating-point tensors in `dtype`; None where nothing is to be changed."""
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and args[0].dtype == dtype:
        return None
    if not kwargs and all(_needs_nothing(value, dtype) for value in args):
        return None
    if torch.is_autocast_enabled(device):
        return None  # the user's autocast decides
    return _cast(args, dtype), _cast(kwargs, dtype)


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype or tensor.dtype not in _CASTABLE


def _needs_nothing(value: Any, dtype: torch.dtype) -> bool:
    return (
        _fits(value, dtype) if isinstance(value, Tensor) else value is None or isinstance(value, int | float)
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value if _fits(value, dtype) else value.to(dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed, field.name, _cast(getattr(value, field.name), dtype))
        return changed
    if isinstance(value, list | tuple | dict):
        return torch.utils._pytree.tree_map(lambda leaf: _cast_leaf(leaf, dtype), value)
    return value


def _cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    # Containers that pytree does not know are not entered.
    return leaf if isinstance(leaf, list | tuple | dict) else _cast(leaf, dtype)


def keep_statistics(model: nn.Module, compute: torch.dtype) -> None:
    """Let normalisation layers with running statistics work in half precision as under autocast.

    Their statistics stay in fp32, and meet weights in fp32: those of this pass are copies in the module's `__dict__`,
    which hides its parameters. Spectral norm's vectors take the dtype of the weight that they are multiplied by, as
    with `model.bfloat16()`.
    """
    if compute == torch.float32:
        return
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            module.register_forward_pre_hook(_show_exact)
            module.register_forward_hook(_hide_exact, always_call=True)
        spectral = isinstance(module, _SpectralNorm)
        names = {f"{hook.name}{end}" for hook in _older_spectral_norms(module) for end in ("_u", "_v")}
        for name, buffer in module.named_buffers(recurse=False):
            if (spectral or name in names) and buffer.is_floating_point():
                module._buffers[name] = buffer.to(compute)


def _older_spectral_norms(module: nn.Module) -> list[SpectralNorm]:
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if isinstance(hook, SpectralNorm)]


def _show_exact(module: nn.Module, args: Any) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module.__dict__[name] = parameter.float()


def _hide_exact(module: nn.Module, args: Any, output: Any) -> None:
    for name in module._parameters:
        module.__dict__.pop(name, None)
