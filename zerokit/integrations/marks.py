"""What accelerate and transformers find on a model that `ZeroAccelerator` has sharded."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

import zerokit
from zerokit.checkpoint.snapshot import persistent_buffers
from zerokit.errors import UsageError
from zerokit.training import ZeroOptimizer

_SHARDED = "_zerokit_sharded"  # the attribute that holds what was registered
_GENERATES_TOGETHER = "_is_fsdp_managed_module"
"""By this mark transformers' `generate` calls the model until all ranks' texts have ended (`synced_gpus`).

Modules without `generate` are not marked: encoders of speech would run the layers that LayerDrop leaves out.
"""


def mark(model: nn.Module, zero: ZeroOptimizer, *, shares: bool) -> None:
    """Mark `model` as prepared; every evaluation sees rank 0's running statistics if it `shares` them."""
    hooks = []
    statistics = list(persistent_buffers(model).values())
    collectives = zero.runtime.collectives

    def share(module: nn.Module, inputs: Any) -> None:
        # As under DDP, and as they are saved. Not where a graph is built: an earlier one may have saved the buffers.
        if not module.training and not torch.is_grad_enabled():
            for buffer in statistics:
                collectives.broadcast(buffer)

    if shares and statistics:
        hooks.append(model.register_forward_pre_hook(share))
    model.__dict__ |= {"_is_accelerate_prepared": True, _SHARDED: hooks, "no_sync": _refuse_no_sync}
    for module in model.modules() if zero.runtime.placement.cuts_parameters else ():
        if hasattr(module, "generate"):
            module.__dict__[_GENERATES_TOGETHER] = True


def take_back(model: nn.Module) -> None:
    """Release a sharded model, and remove the marks of an earlier accelerator. Collective."""
    zerokit.release(model)
    for hook in model.__dict__.get(_SHARDED, ()):
        hook.remove()
    for name in ("_is_accelerate_prepared", _SHARDED, "no_sync"):
        model.__dict__.pop(name, None)
    for module in model.modules():
        module.__dict__.pop(_GENERATES_TOGETHER, None)


def is_unsharded(model: nn.Module) -> bool:
    """Whether a model is to be trained, and not sharded yet; accelerate's own mark stands for evaluation, too."""
    return _SHARDED not in model.__dict__ and any(p.requires_grad for p in model.parameters())


def _refuse_no_sync() -> NoReturn:
    raise UsageError(
        "model.no_sync() is DistributedDataParallel's: write accelerator.no_sync(model); local steps, for which "
        "accelerate's LocalSGD calls it, are those of zerokit.LocalSteps"
    )
