"""Sizes of models, as plain data, and what follows from them by arithmetic.

Every count of parameters here is a formula over the sizes, and a test compares it with the model that torch builds.
`parameters` counts trainable elements, tied ones once; `looked_up` those among them that are only ever looked up, not
multiplied: an embedding table that is not the head as well. They take part in no product and so in no count of FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def looked_up(self) -> int:
        """The positions; the tokens' table is the head."""
        return self.positions * self.width


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

    @property
    def looked_up(self) -> int:
        """The tokens' table, unless it is the head."""
        return 0 if self.tied else self.vocabulary * self.width


@dataclass(frozen=True, slots=True)
class BertConfig:
    """A BERT encoder with its masked-language head (arXiv:1810.04805); the head's matrix is the tokens' table."""

    vocabulary: int = 30_522
    positions: int = 512
    types: int = 2
    width: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int = 3072

    @property
    def parameters(self) -> int:
        """Trainable elements, the tied table counted once."""
        embeddings = (self.vocabulary + self.positions + self.types + 2) * self.width
        attention = 4 * (self.width**2 + self.width)
        feed_forward = 2 * self.width * self.hidden + self.hidden + self.width
        head = self.width**2 + 3 * self.width + self.vocabulary
        return embeddings + self.layers * (attention + feed_forward + 4 * self.width) + head

    @property
    def looked_up(self) -> int:
        """Positions and types; the tokens' table is the head."""
        return (self.positions + self.types) * self.width


@dataclass(frozen=True, slots=True)
class ResNetConfig:
    """A residual network of bottleneck blocks (arXiv:1512.03385), with the stride in the 3×3 convolution ("v1.5").

    Each block of a stage squeezes to a quarter of the stage's width and back.
    """

    depths: tuple[int, int, int, int]
    widths: tuple[int, int, int, int] = (256, 512, 1024, 2048)
    stem: int = 64
    classes: int = 1000
    channels: int = 3
    image_size: int = 224

    @property
    def parameters(self) -> int:
        """Trainable elements; every convolution is followed by a BatchNorm with two a channel."""
        total = self.stem * (7 * 7 * self.channels + 2)
        before = self.stem
        for depth, width in zip(self.depths, self.widths, strict=True):
            squeezed = width // 4
            total += width * (before + 2)  # the shortcut of the stage's first block
            for _ in range(depth):
                total += squeezed * (before + 2) + squeezed * (9 * squeezed + 2) + width * (squeezed + 2)
                before = width
        return total + self.classes * (before + 1)


@dataclass(frozen=True, slots=True)
class InceptionConfig:
    """Inception v3 (arXiv:1512.00567) as torchvision has it, trained with its auxiliary classifier."""

    classes: int = 1000
    channels: int = 3
    image_size: int = 299

    @property
    def parameters(self) -> int:
        """Both classifiers; the rest, without its 1000 classes, is a count of torchvision's model."""
        return 24_343_264 + (2048 + 1 + 768 + 1) * self.classes


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """One hidden layer over the pixels of a grey image, as first courses train it on MNIST."""

    image_size: int = 28
    hidden: int = 256
    classes: int = 10
    channels: int = 1

    @property
    def parameters(self) -> int:
        """Two matrices and two biases."""
        pixels = self.channels * self.image_size**2
        return (pixels + 1) * self.hidden + (self.hidden + 1) * self.classes


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """A linear regression onto one number."""

    features: int = 100

    @property
    def parameters(self) -> int:
        """The weights and the offset."""
        return self.features + 1


TextConfig = GPTConfig | LlamaConfig | BertConfig
ImageConfig = ResNetConfig | InceptionConfig | MLPConfig
Config = TextConfig | ImageConfig | LinearConfig
