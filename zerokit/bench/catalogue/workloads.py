"""Every workload by name: its sizes, its unit, and the packages it requires. Standard library only.

A name is one of `WORKLOADS`, or `package.module:factory` for the user's own (`own` says what a factory returns).
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
        "torchvision": "pip install torchvision, in the version that matches the installed torch",
    }
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload: one value of `--model`.

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
        """The unit that throughput counts."""
        return (self.config or Config).unit

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


# Of language models: vocabulary, positions, width, layers, heads; of Llamas also heads of keys and values, and the
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
