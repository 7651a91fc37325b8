"""A GPT-2-style decoder, written to be read: embedding, blocks, final norm, tied head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerokit.bench.catalogue.sizes import GPTConfig
from zerokit.bench.workloads.initialise import (
    DEFAULT_STD,
    init_model,
    name_modules,
    set_std,
)

__all__ = ["GPT", "Block", "GPTConfig"]


class Attention(nn.Module):
    """Causal multi-head self-attention; queries, keys and values come from one matrix."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = hidden.shape
        split = self.qkv(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class MLP(nn.Module):
    """Four times as wide inside, with an exact GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        projected: Tensor = self.down(F.gelu(self.up(hidden)))
        return projected


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and around a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        hidden = hidden + self.attention(self.norm1(hidden))
        added: Tensor = hidden + self.mlp(self.norm2(hidden))
        return added


class GPT(nn.Module):
    """The model of a `GPTConfig`; `head.weight` is `tokens.weight`.

    Args:
        config: sizes.
        seed: of the weights; they depend on it and on the modules' names alone.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.blocks:
            assert isinstance(module, Block)
            # GPT-2 scales what is added to the residual by the number of additions (two a layer).
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
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
