"""The bench's own models, written to be read: GPT-2- and Llama-style decoders, and the two smallest workloads.

A decoder is an embedding, blocks, a final norm and a head. A block is attention and a feed-forward, each after a norm
and around a residual; what the two families put there differs. All of these take (batch, length, width) to the same.

Weights, of these models and of libraries', depend on a seed and a module's name, and on nothing else. Each module draws
from a generator of its own. So it does not matter in which order, on which rank or in how many pieces a model is
initialised, and a model on meta gets the weights of one in memory. All are made on meta, whose construction costs
nothing, and get memory and weights afterwards.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zerokit.bench.catalogue.workloads import Config, GPTConfig, LinearConfig, LlamaConfig, MLPConfig

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


class Attention(nn.Module):
    """Causal multi-head self-attention; queries, keys and values come from one matrix."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.qkv(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class GELU(nn.Module):
    """A feed-forward four times as wide inside, with an exact GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.down(F.gelu(self.up(hidden)))
        return projected


def rotary_angles(length: int, head_width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (length, head_width / 2) in fp32 (RoFormer, arXiv:2104.09864).

    Computed on every forward: a buffer would have to be materialised apart in a model built on meta.
    """
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32, device=device) / head_width
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, base**-exponents)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of the last axis of (batch, heads, length, head_width) by its angle."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(heads.dtype)


class GroupedAttention(nn.Module):
    """Causal attention with rotary positions, in which several query heads share a key and a value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.grouped = config.key_value_heads != config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.key_value_heads * self.head_width, bias=False)
        self.value = nn.Linear(config.width, config.key_value_heads * self.head_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def _heads(self, projected: Tensor) -> Tensor:
        batch, length, _ = projected.shape
        return projected.view(batch, length, -1, self.head_width).transpose(1, 2)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        query = rotate(self._heads(self.query(hidden)), cosines, sines)
        key = rotate(self._heads(self.key(hidden)), cosines, sines)
        value = self._heads(self.value(hidden))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class SwiGLU(nn.Module):
    """A gated feed-forward (arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return projected


class Block(nn.Module):
    """Attention and feed-forward; `rotary` are the cosines and sines of a Llama."""

    def __init__(self, config: GPTConfig | LlamaConfig) -> None:
        super().__init__()
        self.norm1 = _norm(config)
        self.attention = Attention(config) if isinstance(config, GPTConfig) else GroupedAttention(config)
        self.norm2 = _norm(config)
        self.mlp = GELU(config) if isinstance(config, GPTConfig) else SwiGLU(config)
        # GPT-2 scales what is added to the residual by the number of additions (two a layer).
        for last in (self.attention.out, self.mlp.down):
            set_std(last, DEFAULT_STD / math.sqrt(2 * config.layers))

    def forward(self, hidden: Tensor, *rotary: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm1(hidden), *rotary)
        added: Tensor = hidden + self.mlp(self.norm2(hidden))
        return added


class Decoder(nn.Module):
    """A GPT or a Llama; `head.weight` is `tokens.weight` unless the configuration says otherwise."""

    def __init__(self, config: GPTConfig | LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        if isinstance(config, GPTConfig):
            self.positions = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if isinstance(config, GPTConfig) or config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, length, vocabulary), or with targets the mean cross-entropy in fp32, a scalar.

        Args:
            tokens: (batch, length) of integers, length at most `config.positions`.
            targets: the next tokens, of the same shape.
        """
        config, length, device = self.config, tokens.shape[1], tokens.device
        hidden = self.tokens(tokens)
        rotary: tuple[Tensor, ...] = ()
        if isinstance(config, GPTConfig):
            hidden = hidden + self.positions(torch.arange(length, device=device))
        else:
            rotary = rotary_angles(length, config.width // config.heads, config.rotary_base, device)
        for block in self.blocks:
            hidden = block(hidden, *rotary)
        logits: Tensor = self.head(self.norm(hidden))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _norm(config: GPTConfig | LlamaConfig) -> nn.Module:
    if isinstance(config, GPTConfig):
        return nn.LayerNorm(config.width)
    return nn.RMSNorm(config.width, eps=config.norm_epsilon)


class MLP(nn.Module):
    """Pixels, a hidden layer with ReLU, classes."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.hidden = nn.Linear(config.channels * config.image_size**2, config.hidden)
        self.out = nn.Linear(config.hidden, config.classes)
        set_std(self.hidden, math.sqrt(2.0 / self.hidden.in_features))
        set_std(self.out, math.sqrt(1.0 / self.out.in_features))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy in fp32; images (batch, channels, size, size), labels (batch,)."""
        logits = self.out(F.relu(self.hidden(images.flatten(1))))
        return F.cross_entropy(logits.float(), labels)


class Linear(nn.Module):
    """A linear regression."""

    def __init__(self, config: LinearConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.features, 1)

    def forward(self, features: Tensor, targets: Tensor) -> Tensor:
        """The mean squared error in fp32; features (batch, features), targets (batch,)."""
        return F.mse_loss(self.linear(features).squeeze(1).float(), targets.float())


MODELS: Mapping[type[Config], Callable[[Any], nn.Module]] = {
    GPTConfig: Decoder,
    LlamaConfig: Decoder,
    MLPConfig: MLP,
    LinearConfig: Linear,
}
"""Each makes a model from a configuration of its kind, without weights of its own."""
