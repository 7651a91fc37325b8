"""Modules and tensors that cannot be sharded as they are: each kind is named at construction, with what to do."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from zerokit.errors import UsageError
from zerokit.runtime.torch_internals import elements_share_memory


def require_ordinary_tensors(model: nn.Module) -> None:
    """Raise `UsageError` for scripted and lazy modules, expanded parameters, and what inference mode has made."""
    if torch.is_inference_mode_enabled():
        raise UsageError(
            "ZeroOptimizer is built inside torch.inference_mode(), whose tensors cannot be trained: build it outside"
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"{path or 'the model'} is a {type(module).__name__} of torch.jit, which holds its parameters outside "
                "of Python: pass the plain module, and speed it up by its compile()"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise UsageError(
                f"{name} is in a lazy module, and has no shape yet: run the model once on a batch before "
                "ZeroOptimizer is built"
            )
        if tensor.is_inference():
            raise UsageError(
                f"{name} was made inside torch.inference_mode(), so it cannot be trained: build or load the model "
                "outside, under torch.no_grad() where that is wanted"
            )
        if isinstance(tensor, nn.Parameter) and elements_share_memory(tensor):
            raise UsageError(
                f"{name} is expanded: several of its elements share memory, and an update would give them different "
                "values: keep the small tensor and expand it in forward, or copy it with .clone()"
            )
