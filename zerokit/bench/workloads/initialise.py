"""Weights that depend on a seed and a module's name, and on nothing else.

Each module draws from a generator of its own. So it does not matter in which order, on which rank or in how many
pieces a model is initialised, and a model on meta gets the weights of one in memory. All are made on meta, whose
construction costs nothing, and get memory and weights afterwards.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_SEED = "_init_seed"
_STD = "_init_std"
_ROTARY_BASE = "_init_rotary_base"
DEFAULT_STD = 0.02


def set_std(module: nn.Module, std: float) -> None:
    """Draw `module`'s weight with this standard deviation."""
    setattr(module, _STD, std)


def set_rotary_base(module: nn.Module, base: float) -> None:
    """Use powers of this base as `module`'s rotary frequencies."""
    setattr(module, _ROTARY_BASE, base)


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
    """Fill the parameters and buffers that `module` itself owns (not its children's), in place.

    Matrices are drawn in fp32 from a normal distribution, weights of norms start at one, biases at zero.
    """
    std: float = getattr(module, _STD, DEFAULT_STD)
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim > 1:
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed(getattr(module, _SEED, 0))
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
            parameter.copy_(drawn.normal_(0.0, std, generator=generator))
        else:
            parameter.fill_(1.0 if name == "weight" else 0.0)
    if isinstance(module, _BatchNorm):
        module.reset_running_stats()
        return
    for name, buffer in module.named_buffers(recurse=False):
        match name:
            case "position_ids":
                buffer.copy_(torch.arange(buffer.shape[-1], device=buffer.device).expand_as(buffer))
            case "token_type_ids":
                buffer.zero_()
            case "inv_freq" | "original_inv_freq":
                half = torch.arange(0, 2 * len(buffer), 2, dtype=torch.float32, device=buffer.device)
                buffer.copy_(1.0 / getattr(module, _ROTARY_BASE) ** (half / (2 * len(buffer))))
            case "bias":  # the causal mask of GPT-2 in transformers 4
                buffer.copy_(torch.ones_like(buffer).tril())
            case "masked_bias":  # and what it puts where the future was
                buffer.fill_(-1e4)
            case _:
                raise AssertionError(f"{type(module).__name__}.{name}: the values of this buffer are unknown")


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate and initialise a meta model on `device`; tied parameters stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    memory = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(memory, parameter.requires_grad)
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    for module in model.modules():
        init_module(module)
