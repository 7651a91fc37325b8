"""Weights that depend on a seed and a module's name, and on nothing else.

Each module draws from a generator of its own. So it does not matter in which order, on which rank or in how
many pieces a model is initialised, and a model built on meta gets the weights of one built in memory.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_SEED = "_init_seed"
_STD = "_init_std"
DEFAULT_STD = 0.02


def default_device() -> torch.device:
    """Where tensors are made, `torch.device` as a context included: torch 2.6's own function sees no context."""
    return torch.empty(0).device


def set_std(module: nn.Module, std: float) -> None:
    """Let `module`'s weight be drawn with this standard deviation."""
    setattr(module, _STD, std)


def name_modules(model: nn.Module, seed: int) -> None:
    """Give every module of `model` the seed that `init_module` will use.

    A module whose matrix is tied to an earlier one's draws the same numbers: then order does not matter.
    """
    owners: dict[nn.Parameter, nn.Module] = {}
    for name, module in model.named_modules():
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
        setattr(module, _SEED, int.from_bytes(digest, "little"))
        for parameter in module.parameters(recurse=False):
            owner = owners.setdefault(parameter, module)
            if owner is not module and parameter.ndim > 1:
                setattr(module, _SEED, getattr(owner, _SEED))
                set_std(module, getattr(owner, _STD, DEFAULT_STD))


@torch.no_grad()
def init_module(module: nn.Module) -> None:
    """Fill the parameters that `module` itself owns (not its children's), in place, and a BatchNorm's statistics.

    Matrices are drawn in fp32 from a normal distribution, weights of norms start at one, biases at zero.
    """
    std: float = getattr(module, _STD, DEFAULT_STD)
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim > 1:
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed(getattr(module, _SEED, 0))
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
            parameter.copy_(drawn.normal_(0.0, std, generator=generator))
        elif name == "weight":
            parameter.fill_(1.0)
        else:
            parameter.zero_()
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        module.reset_running_stats()


def init_model(model: nn.Module) -> None:
    """`init_module` on every module, unless the model lies on meta, where there is nothing to fill."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    for module in model.modules():
        init_module(module)
