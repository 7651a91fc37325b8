"""Every workload by name: its sizes, its unit, and the packages it requires. Standard library only.

A name is one of `WORKLOADS`, or `package.module:factory` for the user's own (`own` says what a factory returns). Every
count of parameters is a formula, and a test compares it with the model that torch builds.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

from zerokit.errors import UsageError


@dataclass(frozen=True)
class Config(ABC):
    """Sizes of one model; `unit` is what throughput counts, `default_data` the default of `--data`.

    `divisible` says whether a batch's loss is the mean of its samples' losses, of whatever other samples there are.
    """

    unit: ClassVar[str] = "samples"
    default_data: ClassVar[str] = "synthetic"
    divisible: ClassVar[bool] = True

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

    N are the parameters that take part in a product for every token (`multiplied`), L the `layers`, d the `width` and s
    the `length` in tokens. A multiplication and an addition count as two. Attention counts whole, whether or not half
    of it is masked, as in PaLM (arXiv:2204.02311, appendix B) and in the published figures that are compared with.
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
    divisible = False  # for its BatchNorms

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
    divisible = False

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


# What to install for a workload whose model another library builds.
INSTALL: Mapping[str, str] = MappingProxyType(
    {
        "transformers": "pip install 'zerokit[hf]'",
        "torchvision": "pip install torchvision, in the version that matches the installed torch",
    }
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload: one value of `--model`.

    `config` is None for the user's own, `library` the package that builds the model if zerokit or the user does not.
    """

    name: str
    config: Config | None
    library: str | None = None

    @property
    def unit(self) -> str:
        """The unit that throughput counts."""
        return (self.config or Config).unit

    @property
    def divisible(self) -> bool:
        """Whether a batch's loss is a mean over its samples; of a user's own model its `Own` says it."""
        return (self.config or Config).divisible

    @property
    def text(self) -> TextConfig | None:
        """The sizes of a language model; None for others."""
        return self.config if isinstance(self.config, TextConfig) else None

    @property
    def images(self) -> ImageConfig | None:
        """The sizes of a classifier of images; None for others."""
        return self.config if isinstance(self.config, ImageConfig) else None

    @property
    def parameters(self) -> int | None:
        """Trainable elements, tied ones once; None for a user's own model, which is not built yet."""
        return None if self.config is None else self.config.parameters

    @property
    def default_data(self) -> str:
        """The default of `--data`: real text for language models, otherwise synthetic."""
        return (self.config or Config).default_data

    @property
    def missing(self) -> str | None:
        """How to install the package that builds the model."""
        if self.library is None or importlib.util.find_spec(self.library) is not None:
            return None
        return f"{self.name} is built by {self.library}, which is not installed here; {INSTALL[self.library]}"


# Language models: vocabulary, positions, width, layers, heads; for Llamas also heads of keys and values, and the
# width of the feed-forward.
_BUILT_IN: Mapping[str, Config] = {
    # For tests: small enough that starting Python takes longer than training it.
    "gpt-tiny": GPTConfig(256, 64, 32, 2, 2),
    "gpt-5m": GPTConfig(256, 256, 256, 6, 4),
    "gpt-34m": GPTConfig(16_384, 128, 512, 8, 8),
    "gpt2-124m": GPTConfig(50_257, 1024, 768, 12, 12),
    "llama-tiny": LlamaConfig(256, 64, 32, 2, 4, 2, 64, tied=False),
    # Shapes of Llama 3.2 1B and Llama 3.1 8B; their stretched rotary frequencies are left out, since they
    # change no shape and no cost.
    "llama-1b": LlamaConfig(128_256, 8192, 2048, 16, 32, 8, 8192, tied=True),
    "llama-8b": LlamaConfig(128_256, 8192, 4096, 32, 32, 8, 14_336, tied=False),
    "linear": LinearConfig(),
    "mlp-mnist": MLPConfig(),
}

_LLAMA = LlamaConfig(32_000, 2048, 4096, 32, 32, 32, 11_008, False, rotary_base=10_000.0, norm_epsilon=1e-6)
_TRANSFORMERS: Mapping[str, Config] = {
    # GPT-2 (Radford et al. 2019, table 2), with the widths of the released weights.
    "gpt2": GPTConfig(50_257, 1024, 768, 12, 12),
    "gpt2-medium": GPTConfig(50_257, 1024, 1024, 24, 16),
    "gpt2-large": GPTConfig(50_257, 1024, 1280, 36, 20),
    "gpt2-xl": GPTConfig(50_257, 1024, 1600, 48, 25),
    # GPT-3 (arXiv:2005.14165, table 2.1), every layer dense. Two rows of the table contradict themselves and are
    # read by its text, "d_head = d_model / n_heads": 1.3B has 24 heads of 128 in a width of 2048 (16 here), 13B a
    # width of 5140 for 40 heads of 128 (5120 here).
    "gpt3-125m": GPTConfig(50_257, 2048, 768, 12, 12),
    "gpt3-350m": GPTConfig(50_257, 2048, 1024, 24, 16),
    "gpt3-760m": GPTConfig(50_257, 2048, 1536, 24, 16),
    "gpt3-1.3b": GPTConfig(50_257, 2048, 2048, 24, 16),
    "gpt3-2.7b": GPTConfig(50_257, 2048, 2560, 32, 32),
    "gpt3-6.7b": GPTConfig(50_257, 2048, 4096, 32, 32),
    "gpt3-13b": GPTConfig(50_257, 2048, 5120, 40, 40),
    "gpt3-175b": GPTConfig(50_257, 2048, 12_288, 96, 96),
    # LLaMA (arXiv:2302.13971, table 2), and 70B of Llama 2 (arXiv:2307.09288).
    "llama-7b": _LLAMA,
    "llama-13b": replace(_LLAMA, width=5120, layers=40, heads=40, key_value_heads=40, hidden=13_824),
    "llama-30b": replace(_LLAMA, width=6656, layers=60, heads=52, key_value_heads=52, hidden=17_920),
    "llama-65b": replace(_LLAMA, width=8192, layers=80, heads=64, key_value_heads=64, hidden=22_016),
    "llama-70b": LlamaConfig(32_000, 4096, 8192, 80, 64, 8, 28_672, False, rotary_base=10_000.0),
    "bert-base": BertConfig(30_522, 512, 768, 12, 12, hidden=3072),
    "resnet50": ResNetConfig((3, 4, 6, 3)),
    "resnet152": ResNetConfig((3, 8, 36, 3)),
}

WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        **{name: Workload(name, config) for name, config in _BUILT_IN.items()},
        **{name: Workload(name, config, "transformers") for name, config in _TRANSFORMERS.items()},
        "inception-v3": Workload("inception-v3", InceptionConfig(), "torchvision"),
    }
)

_IDENTIFIER = r"[^\W\d]\w*"
_FACTORY = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}(\.{_IDENTIFIER})*")


def describe(name: str) -> Workload:
    """The workload of this name; raises `UsageError` with similar names if it is unknown."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    if _FACTORY.fullmatch(name):
        return Workload(name, None)
    if ":" in name:
        raise UsageError(f"model {name!r} is not a factory: write package.module:function")
    close = difflib.get_close_matches(name, WORKLOADS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(WORKLOADS)}"
    raise UsageError(f"model {name!r} is unknown: {hint} (or package.module:factory for your own)")
