"""Every workload by name: its sizes, its unit, what it needs installed. Standard library only.

A name is one of `WORKLOADS`, or `package.module:factory` for the user's own (`own` says what a factory returns).
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zerokit.bench.catalogue.sizes import (
    BertConfig,
    Config,
    GPTConfig,
    ImageConfig,
    InceptionConfig,
    LinearConfig,
    LlamaConfig,
    MLPConfig,
    ResNetConfig,
    TextConfig,
)
from zerokit.errors import UsageError

# What to install for a workload whose model another library builds.
INSTALL: Mapping[str, str] = MappingProxyType(
    {
        "transformers": "pip install 'zerokit[hf]'",
        "torchvision": "pip install torchvision, in the version that belongs to the installed torch",
    }
)
# Each halving of an image's sides but the last may not end in nothing.
_SMALLEST_IMAGE = {"resnet": 32, "inception": 75}


@dataclass(frozen=True, slots=True)
class Workload:
    """One `--model`.

    Attributes:
        name: as asked for.
        config: its sizes; None for the user's own.
        library: the package that builds the model; None where zerokit, or the user, does.
    """

    name: str
    config: Config | None
    library: str | None = None

    @property
    def unit(self) -> str:
        """What throughput counts."""
        if self.text is not None:
            return "tokens"
        return "images" if self.images is not None else "samples"

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
        """Trainable elements, tied ones once; None for the user's own, until it is built."""
        return None if self.config is None else self.config.parameters

    @property
    def default_data(self) -> str:
        """What `--data` is where it is not given: real text for language models, else made up."""
        return "standard-library" if self.text is not None else "synthetic"

    @property
    def missing(self) -> str | None:
        """How to get the package that builds it, where that is not installed."""
        if self.library is None or importlib.util.find_spec(self.library) is not None:
            return None
        return f"{self.name} is built by {self.library}, which is not installed here; {INSTALL[self.library]}"

    def check(self, *, seq_len: int, image_size: int | None, batch_size: int, data: str | None) -> None:
        """Raise `UsageError` where a size, or the kind of data, does not fit the workload."""
        if self.text is not None and seq_len > self.text.positions:
            raise UsageError(
                f"seq_len {seq_len} exceeds the {self.text.positions} positions of {self.name}; use a smaller --seq-len"
            )
        if data not in (None, "synthetic") and self.text is None and self.images is None:
            raise UsageError(f"{self.name} makes its own data: leave --data {data} out")
        if image_size is None and self.images is None:
            return
        if self.images is None:
            raise UsageError(f"{self.name} takes no images: leave image_size {image_size} out")
        self._check_images(self.images, image_size or self.images.image_size, batch_size)

    def _check_images(self, config: ImageConfig, size: int, batch_size: int) -> None:
        if isinstance(config, MLPConfig):
            if size != config.image_size:
                raise UsageError(f"{self.name} takes images of {config.image_size} pixels a side, not {size}")
            return
        smallest = _SMALLEST_IMAGE["resnet" if isinstance(config, ResNetConfig) else "inception"]
        if size < smallest:
            raise UsageError(f"image_size {size} is too small for {self.name}: at least {smallest}")
        # A BatchNorm over one value a channel has no variance: at the last stage of a ResNet, and in Inception's
        # auxiliary classifier at its usual size.
        if batch_size == 1 and (isinstance(config, InceptionConfig) or size == smallest):
            raise UsageError(f"{self.name} at {size} pixels needs a batch of at least 2: give --batch-size")


def _gpt2(width: int, layers: int, heads: int, positions: int = 1024) -> GPTConfig:
    return GPTConfig(50_257, positions, width, layers, heads)


def _gpt3(width: int, layers: int, heads: int) -> GPTConfig:
    return _gpt2(width, layers, heads, positions=2048)


def _llama(
    width: int,
    layers: int,
    heads: int,
    hidden: int,
    positions: int = 2048,
    key_value_heads: int | None = None,
) -> LlamaConfig:
    epsilon = 1e-6 if positions == 2048 else 1e-5
    return LlamaConfig(
        32_000, positions, width, layers, heads, key_value_heads or heads, hidden, False, 10_000.0, epsilon
    )


_BUILT_IN: dict[str, Config] = {
    # For tests: small enough that starting Python takes longer than training it.
    "gpt-tiny": GPTConfig(vocabulary=256, positions=64, width=32, layers=2, heads=2),
    "gpt-5m": GPTConfig(vocabulary=256, positions=256, width=256, layers=6, heads=4),
    "gpt-34m": GPTConfig(vocabulary=16_384, positions=128, width=512, layers=8, heads=8),
    "gpt2-124m": _gpt2(768, 12, 12),
    "llama-tiny": LlamaConfig(
        vocabulary=256, positions=64, width=32, layers=2, heads=4, key_value_heads=2, hidden=64, tied=False
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
    "linear": LinearConfig(),
    "mlp-mnist": MLPConfig(),
}

_TRANSFORMERS: dict[str, Config] = {
    # GPT-2 (Radford et al. 2019, table 2), with the widths of the released weights.
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    # GPT-3 (arXiv:2005.14165, table 2.1), every layer dense. Two rows of the table contradict themselves and are
    # read by its text, "d_head = d_model / n_heads": 1.3B has 24 heads of 128 in a width of 2048 (16 here), 13B a
    # width of 5140 for 40 heads of 128 (5120 here).
    "gpt3-125m": _gpt3(768, 12, 12),
    "gpt3-350m": _gpt3(1024, 24, 16),
    "gpt3-760m": _gpt3(1536, 24, 16),
    "gpt3-1.3b": _gpt3(2048, 24, 16),
    "gpt3-2.7b": _gpt3(2560, 32, 32),
    "gpt3-6.7b": _gpt3(4096, 32, 32),
    "gpt3-13b": _gpt3(5120, 40, 40),
    "gpt3-175b": _gpt3(12_288, 96, 96),
    # LLaMA (arXiv:2302.13971, table 2), and 70B of Llama 2 (arXiv:2307.09288).
    "llama-7b": _llama(4096, 32, 32, 11_008),
    "llama-13b": _llama(5120, 40, 40, 13_824),
    "llama-30b": _llama(6656, 60, 52, 17_920),
    "llama-65b": _llama(8192, 80, 64, 22_016),
    "llama-70b": _llama(8192, 80, 64, 28_672, positions=4096, key_value_heads=8),
    "bert-base": BertConfig(),
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


def is_factory(name: str) -> bool:
    """Whether a name has the form `package.module:factory`."""
    return _FACTORY.fullmatch(name) is not None


def describe(name: str) -> Workload:
    """The workload of a name; raises `UsageError` for an unknown one, with the names that are close to it."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    if is_factory(name):
        return Workload(name, None)
    if ":" in name:
        raise UsageError(f"model {name!r} is no factory: write it as package.module:function")
    close = difflib.get_close_matches(name, WORKLOADS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(WORKLOADS)}"
    raise UsageError(f"model {name!r} is unknown: {hint} (or package.module:factory for your own)")
