"""A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerokit.bench.catalogue.sizes import LlamaConfig
from zerokit.bench.workloads.initialise import (
    DEFAULT_STD,
    init_model,
    name_modules,
    set_std,
)

__all__ = ["Llama", "LlamaBlock", "LlamaConfig"]


def rotary_angles(length: int, head_width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (length, head_width / 2) in fp32 (RoFormer, arXiv:2104.09864).

    Computed on every forward: a buffer would have to be materialised apart in a model built on meta.
    """
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32, device=device) / head_width
    places = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(places, base**-exponents)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of the last axis of (batch, heads, length, head_width) by its angle."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(heads.dtype)


class LlamaAttention(nn.Module):
    """Causal attention in which several query heads share a key and a value head."""

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
        """(batch, length, width) to the same."""
        query = rotate(self._heads(self.query(hidden)), cosines, sines)
        key = rotate(self._heads(self.key(hidden)), cosines, sines)
        value = self._heads(self.value(hidden))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class SwiGLU(nn.Module):
    """A gated MLP (arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        projected: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return projected


class LlamaBlock(nn.Module):
    """Attention and MLP, each after an RMSNorm and around a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = LlamaAttention(config)
        self.norm2 = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.mlp = SwiGLU(config)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        hidden = hidden + self.attention(self.norm1(hidden), cosines, sines)
        added: Tensor = hidden + self.mlp(self.norm2(hidden))
        return added


class Llama(nn.Module):
    """The model of a `LlamaConfig`; the head is the embedding when the configuration is tied.

    Args:
        config: sizes.
        seed: of the weights; they depend on it and on the modules' names alone.
    """

    def __init__(self, config: LlamaConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        for module in self.blocks:
            assert isinstance(module, LlamaBlock)
            set_std(module.attention.out, DEFAULT_STD / math.sqrt(2 * config.layers))
            set_std(module.mlp.down, DEFAULT_STD / math.sqrt(2 * config.layers))
        name_modules(self, seed)
        init_model(self)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, length, vocabulary), or with targets the mean cross-entropy in fp32, a scalar.

        Args:
            tokens: (batch, length) of integers, length at most `config.positions`.
            targets: the next tokens, of the same shape.
        """
        hidden = self.tokens(tokens)
        head_width = self.config.width // self.config.heads
        cosines, sines = rotary_angles(tokens.shape[1], head_width, self.config.rotary_base, tokens.device)
        for block in self.blocks:
            hidden = block(hidden, cosines, sines)
        logits: Tensor = self.head(self.norm(hidden))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
