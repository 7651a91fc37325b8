"""Sizes of the built-in models, as plain data.

Every count of parameters here is a formula over the configuration, and a test compares it with the model
that torch builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """A GPT-2-style decoder: learned positions, pre-LayerNorm with bias, GELU, head tied to the embedding."""

    vocabulary: int
    positions: int
    width: int
    layers: int
    heads: int

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")

    @property
    def parameters(self) -> int:
        """Trainable elements, the tied embedding counted once."""
        block = 12 * self.width**2 + 13 * self.width
        return (self.vocabulary + self.positions + 2) * self.width + self.layers * block


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """A Llama-style decoder: RMSNorm, rotary positions, SwiGLU of width `hidden`, grouped-query attention.

    `positions` only bounds the length of a sequence: rotary positions have no parameters.
    """

    vocabulary: int
    positions: int
    width: int
    layers: int
    heads: int
    key_value_heads: int
    hidden: int
    tied: bool
    rotary_base: float = 500_000.0
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.key_value_heads:
            raise ValueError(
                f"width {self.width} must be a multiple of heads {self.heads}, "
                f"and heads of key_value_heads {self.key_value_heads}"
            )

    @property
    def parameters(self) -> int:
        """Trainable elements, a tied embedding counted once."""
        key_value = self.width // self.heads * self.key_value_heads
        attention = 2 * self.width**2 + 2 * self.width * key_value
        block = attention + 3 * self.width * self.hidden + 2 * self.width
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        return embeddings + self.layers * block + self.width


MODELS: Mapping[str, GPTConfig | LlamaConfig] = MappingProxyType(
    {
        # For tests: small enough that starting Python takes longer than training it.
        "gpt-tiny": GPTConfig(vocabulary=256, positions=64, width=32, layers=2, heads=2),
        "gpt-5m": GPTConfig(vocabulary=256, positions=256, width=256, layers=6, heads=4),
        "gpt-34m": GPTConfig(vocabulary=16_384, positions=128, width=512, layers=8, heads=8),
        "gpt2-124m": GPTConfig(vocabulary=50_257, positions=1024, width=768, layers=12, heads=12),
        "llama-tiny": LlamaConfig(
            vocabulary=256,
            positions=64,
            width=32,
            layers=2,
            heads=4,
            key_value_heads=2,
            hidden=64,
            tied=False,
        ),
        # Shapes of Llama 3.2 1B and Llama 3.1 8B; their stretched rotary frequencies are left out, since they
        # change no shape and no cost.
        "llama-1b": LlamaConfig(
            vocabulary=128_256,
            positions=8192,
            width=2048,
            layers=16,
            heads=32,
            key_value_heads=8,
            hidden=8192,
            tied=True,
        ),
        "llama-8b": LlamaConfig(
            vocabulary=128_256,
            positions=8192,
            width=4096,
            layers=32,
            heads=32,
            key_value_heads=8,
            hidden=14_336,
            tied=False,
        ),
    }
)
