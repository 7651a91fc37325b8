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


def set_std(module: nn.Module, std: float) -> None:
    """Let `module`'s weight be drawn with this standard deviation."""
    setattr(module, _STD, std)


def name_modules(model: nn.Module, seed: int) -> None:
    """Give every module of `model` the seed that `init_module` will use."""
    for name, module in model.named_modules():
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
        setattr(module, _SEED, int.from_bytes(digest, "little"))


def share_seed(module: nn.Module, owner: nn.Module) -> None:
    """Let `module`, whose weight is tied to `owner`'s, draw the same numbers: then order does not matter."""
    setattr(module, _SEED, getattr(owner, _SEED))


@torch.no_grad()
def init_module(module: nn.Module) -> None:
    """Fill the parameters that `module` itself owns (not its children's), in place.

    Matrices are drawn in fp32 from a normal distribution, norms start at one, biases at zero.
    """
    std: float = getattr(module, _STD, DEFAULT_STD)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        if module.weight is not None:
            nn.init.ones_(module.weight)
    elif isinstance(module, nn.Linear | nn.Embedding):
        generator = torch.Generator(device=module.weight.device)
        generator.manual_seed(getattr(module, _SEED, 0))
        drawn = torch.empty(module.weight.shape, dtype=torch.float32, device=module.weight.device)
        module.weight.copy_(drawn.normal_(0.0, std, generator=generator))
    bias = getattr(module, "bias", None)
    if isinstance(bias, nn.Parameter):
        nn.init.zeros_(bias)


def init_model(model: nn.Module) -> None:
    """`init_module` on every module, unless the model lies on meta, where there is nothing to fill."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    for module in model.modules():
        init_module(module)
