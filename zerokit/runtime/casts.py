"""Casts at the borders of modules.

Floating-point inputs take the compute dtype where they meet weights. That is at modules that hold parameters
themselves, in a ParameterList too, and leave none to modules inside (Linear, LayerNorm, a layer of one's own), and at
PyTorch's own that do both (MultiheadAttention). What passes through the model untouched, a timestep or a mask, keeps
its dtype until then: 1001 would become 1000 in bfloat16. A module that computes with parameters beside modules that
have some, or with another module's, must cast by itself, as in any half-precision model.

[Note: modules of another dtype] A module that computes in another dtype than the one around it casts its inputs to its
own, as FSDP2's `cast_forward_inputs` does, and gives its outputs back in that of the one around: tensors of its own
dtype, apart from scalars, such as losses, which change no other's dtype. So code outside sees the dtypes that it would
see without the exception. A pair names what is returned instead, as FSDP2's `output_dtype` does.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.hooks import RemovableHandle

from zerokit.by_module import keys_by_path, settle
from zerokit.runtime.model import CONTAINERS, module_paths
from zerokit.runtime.precision import Precision
from zerokit.runtime.torch_internals import BATCH_NORMS, SPECTRAL_NORM, map_leaves

_LISTS = (nn.ParameterList, nn.ParameterDict)

_CASTABLE = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))


def modules_that_cast(model: nn.Module) -> set[nn.Module]:
    """The modules whose inputs are the first to meet weights."""
    casting = set()
    for module in model.modules():
        if isinstance(module, _LISTS):
            continue  # never called: its parameters meet what enters the module around it
        lists = [child for child in module.children() if isinstance(child, _LISTS)]
        own = any(
            next(part.parameters(recurse=part is not module), None) is not None for part in (module, *lists)
        )
        inside = any(
            next(child.parameters(), None) is not None for child in module.children() if child not in lists
        )
        of_torch = type(module).__module__.startswith("torch.nn.")
        if (own and (of_torch or not inside)) or (is_parametrized(module) and of_torch):
            casting.add(module)
    return casting


def compute_dtypes(model: nn.Module, precision: Precision) -> dict[nn.Module, torch.dtype]:
    """What each module of `model` computes in. Raises `UsageError` for a path that is no module's."""
    paths = module_paths(model)
    settled = settle("precision", precision.by_module, paths)
    return {module: settled[path] for path, module in reversed(paths.items())}


def casting(model: nn.Module, precision: Precision) -> dict[nn.Module, torch.dtype]:
    """The modules that cast their inputs, and to what. In fp32 alone none do: PyTorch refuses other dtypes as ever."""
    dtypes = compute_dtypes(model, precision)
    if not precision.cast_inputs or set(dtypes.values()) == {torch.float32}:
        return {}
    borders = _borders(model, precision, dtypes)
    return {module: dtypes[module] for module in {*modules_that_cast(model), *borders}}


def _borders(
    model: nn.Module, precision: Precision, dtypes: Mapping[nn.Module, torch.dtype]
) -> dict[nn.Module, torch.dtype]:
    """The modules that compute in another dtype than the one around them, or return another, and what they return."""
    paths, found = module_paths(model), dict[nn.Module, torch.dtype]()
    outputs = {key: output for key, (_, output) in precision.modules}
    returned = settle("precision", outputs, paths)
    asked = {path: outputs[key] for path, key in keys_by_path("precision", outputs, paths).items()}
    for path, module in paths.items():
        names, around = [path], path.rpartition(".")[0]
        while isinstance(paths[around], CONTAINERS) and around:  # which are never called
            names, around = [*names, around], around.rpartition(".")[0]
        differs = dtypes[module] != dtypes[paths[around]] or any(map(asked.get, names))
        if differs and not isinstance(module, CONTAINERS):
            found.setdefault(module, returned.get(path) or dtypes[paths[around]])
    return found


def cast_outputs(model: nn.Module, precision: Precision, device: str) -> list[RemovableHandle]:
    """Let modules of another dtype give their outputs in that of the one around, or as asked; returns the hooks.

    See [Note: modules of another dtype].
    """
    dtypes = compute_dtypes(model, precision)
    borders = _borders(model, precision, dtypes) if precision.cast_inputs else {}
    return [
        module.register_forward_hook(partial(_give_back, dtypes[module], returned, device))
        for module, returned in borders.items()
        if returned != dtypes[module]
    ]


def _give_back(
    own: torch.dtype, returned: torch.dtype, device: str, module: nn.Module, args: Any, output: Any
) -> Any:
    if torch.is_autocast_enabled(device):
        return output  # the user's autocast decides
    return _mapped(
        output, lambda tensor: tensor.to(returned) if tensor.dtype == own and tensor.dim() else tensor
    )


def cast_inputs(args: Any, kwargs: Any, dtype: torch.dtype, device: str) -> tuple[Any, Any] | None:
    """`args` and `kwargs` with floating-point tensors cast to `dtype`; None if nothing changes."""
    if not kwargs and all(
        _fits(value, dtype) if isinstance(value, Tensor) else isinstance(value, int | float | None)
        for value in args
    ):
        return None
    if torch.is_autocast_enabled(device):
        return None  # the user's autocast decides
    return _mapped(args, partial(_cast, dtype)), _mapped(kwargs, partial(_cast, dtype))


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype or tensor.dtype not in _CASTABLE


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor if _fits(tensor, dtype) else tensor.to(dtype)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(changed, field.name, _mapped(getattr(value, field.name), change))
        return changed
    if isinstance(value, list | tuple | dict):
        # Containers that pytree does not know are not entered.
        return map_leaves(
            lambda leaf: leaf if isinstance(leaf, list | tuple | dict) else _mapped(leaf, change), value
        )
    return value


def keep_statistics(dtypes: Mapping[nn.Module, torch.dtype]) -> list[RemovableHandle]:
    """Make normalisation layers with running statistics work in half precision as under autocast; returns the hooks.

    `dtypes` are what modules compute in.

    Their statistics stay in fp32, and meet weights in fp32: those of this pass are copies in the module's `__dict__`,
    which hides its parameters. Spectral norm's vectors take the dtype of the weight that they are multiplied by, as
    with `model.bfloat16()`.
    """
    hooks: list[RemovableHandle] = []
    for module, compute in dtypes.items():
        if compute == torch.float32:
            continue
        if isinstance(module, BATCH_NORMS) and module.running_mean is not None:
            hooks.append(module.register_forward_pre_hook(_show_exact))
            hooks.append(module.register_forward_hook(_hide_exact, always_call=True))
        spectral = isinstance(module, SPECTRAL_NORM)
        older = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        names = {f"{hook.name}{end}" for hook in older for end in ("_u", "_v")}
        for name, buffer in module.named_buffers(recurse=False):
            if (spectral or name in names) and buffer.is_floating_point():
                module._buffers[name] = buffer.to(compute)
    return hooks


def _show_exact(module: nn.Module, args: Any) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module.__dict__[name] = parameter.float()


def _hide_exact(module: nn.Module, args: Any, output: Any) -> None:
    for name in module._parameters:
        module.__dict__.pop(name, None)
