"""Models as plain data: their sizes, and the parameter and FLOP counts that follow from them.

Every count of parameters here is a formula, and a test compares it with the model that torch builds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Config(ABC):
    """Sizes of one model; `unit` is what throughput counts, `default_data` the default of `--data`."""

    unit: ClassVar[str] = "samples"
    default_data: ClassVar[str] = "synthetic"

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Trainable elements, tied ones once."""


@dataclass(frozen=True)
class TextConfig(Config):
    """A transformer over at most `positions` tokens."""

    unit = "tokens"
    default_data = "standard-library"

    vocabulary: int
    positions: int
    width: int
    layers: int
    heads: int

    @property
    @abstractmethod
    def looked_up(self) -> int:
        """Parameters outside matrix products: embedding tables that are not also the head."""

    def flops(self, length: int) -> tuple[float, str]:
        """FLOPs per token at sequences of `length`, and a note on how they were counted."""
        multiplied = self.parameters - self.looked_up
        return transformer_flops(multiplied, layers=self.layers, width=self.width, length=length), (
            f"6N + 12·L·d·s a token, N = {multiplied:,}: all parameters but embeddings that are only looked up; "
            f"L = {self.layers}, d = {self.width}, s = {length}, attention whole"
        )


def transformer_flops(multiplied: int, *, layers: int, width: int, length: int) -> float:
    """A token's FLOPs, forward and backward without recomputation: 6N + 12·L·d·s.

    A multiplication and an addition count as two. Attention counts whole, whether or not half of it is masked, as in
    PaLM (arXiv:2204.02311, appendix B) and in the published figures that are compared with.

    Args:
        multiplied: N, the parameters that take part in a product for every token.
        layers: L.
        width: d, of the residual.
        length: s, tokens a sequence.
    """
    return 6.0 * multiplied + 12.0 * layers * width * length


def _block(width: int, hidden: int) -> int:
    """Attention with four matrices, a feed-forward with two, two LayerNorms, all with biases."""
    return 4 * (width**2 + width) + 2 * width * hidden + hidden + width + 4 * width


@dataclass(frozen=True)
class GPTConfig(TextConfig):
    """A GPT-2-style decoder: learned positions, pre-LayerNorm with bias, GELU, head tied to the embedding."""

    @property
    def parameters(self) -> int:
        blocks = self.layers * _block(self.width, 4 * self.width)
        return (self.vocabulary + self.positions + 2) * self.width + blocks

    @property
    def looked_up(self) -> int:
        return self.positions * self.width


@dataclass(frozen=True)
class LlamaConfig(TextConfig):
    """A Llama-style decoder: RMSNorm, rotary positions, SwiGLU of width `hidden`, grouped-query attention.

    `positions` only bounds the length of a sequence: rotary positions have no parameters.
    """

    key_value_heads: int
    hidden: int
    tied: bool
    rotary_base: float = 500_000.0
    norm_epsilon: float = 1e-5

    @property
    def parameters(self) -> int:
        key_value = self.width // self.heads * self.key_value_heads
        attention = 2 * self.width**2 + 2 * self.width * key_value
        block = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.vocabulary * self.width * (1 if self.tied else 2) + self.layers * block + self.width

    @property
    def looked_up(self) -> int:
        return 0 if self.tied else self.vocabulary * self.width


@dataclass(frozen=True)
class BertConfig(TextConfig):
    """A BERT encoder with its masked-language head (arXiv:1810.04805); the head's matrix is the tokens' table."""

    hidden: int
    types: int = 2

    @property
    def parameters(self) -> int:
        embeddings = (self.vocabulary + self.positions + self.types + 2) * self.width
        head = self.width**2 + 3 * self.width + self.vocabulary
        return embeddings + self.layers * _block(self.width, self.hidden) + head

    @property
    def looked_up(self) -> int:
        return (self.positions + self.types) * self.width


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Config):
    """A classifier of square images.

    `smallest` is the image size that the model's halvings leave something of; None for a model of one size alone.
    """

    unit = "images"
    smallest: ClassVar[int | None] = None

    classes: int = 1000
    channels: int = 3
    image_size: int = 224


@dataclass(frozen=True)
class ResNetConfig(ImageConfig):
    """A residual network of bottleneck blocks (arXiv:1512.03385), with the stride in the 3×3 convolution ("v1.5").

    Each block of a stage squeezes to a quarter of the stage's width and back.
    """

    smallest = 32

    depths: tuple[int, int, int, int]
    widths: tuple[int, int, int, int] = (256, 512, 1024, 2048)
    stem: int = 64

    @property
    def parameters(self) -> int:
        """Trainable elements; every convolution is followed by a BatchNorm with two per channel."""
        total = self.stem * (7 * 7 * self.channels + 2)
        before = self.stem
        for depth, width in zip(self.depths, self.widths, strict=True):
            squeezed = width // 4
            total += width * (before + 2)  # the shortcut of the stage's first block
            for _ in range(depth):
                total += squeezed * (before + 2) + squeezed * (9 * squeezed + 2) + width * (squeezed + 2)
                before = width
        return total + self.classes * (before + 1)


@dataclass(frozen=True)
class InceptionConfig(ImageConfig):
    """Inception v3 (arXiv:1512.00567) as torchvision has it, trained with its auxiliary classifier."""

    smallest = 75

    image_size: int = 299

    @property
    def parameters(self) -> int:
        """Trainable elements: both classifiers, and torchvision's count for the rest."""
        return 24_343_264 + (2048 + 1 + 768 + 1) * self.classes


@dataclass(frozen=True)
class MLPConfig(ImageConfig):
    """One hidden layer over the pixels of a grey image, as in introductory courses on MNIST."""

    image_size: int = 28
    hidden: int = 256
    classes: int = 10
    channels: int = 1

    @property
    def parameters(self) -> int:
        pixels = self.channels * self.image_size**2
        return (pixels + 1) * self.hidden + (self.hidden + 1) * self.classes


@dataclass(frozen=True)
class LinearConfig(Config):
    """A linear regression with one output."""

    features: int = 100

    @property
    def parameters(self) -> int:
        return self.features + 1
