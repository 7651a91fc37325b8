"""The models of the measuring parts: GPTs from `bench.workloads`, without the libraries that the catalogue needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zerokit.bench.catalogue.workloads import WORKLOADS, GPTConfig, Workload
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import Loaded, build_model, load
from zerokit.bench.workloads.models import init_module
from zerokit.bench.workloads.own import Own
from zerokit.errors import UsageError


@dataclass(frozen=True)
class Size:
    """A model and a rank's batch of `sequences`, each of `length` tokens."""

    config: GPTConfig
    sequences: int
    length: int

    def own(self) -> Own:
        """The model as a workload of the user's own."""

        def build() -> nn.Module:
            return build_model(self.config, None, seed=0)

        def batch(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
            drawn = torch.randint(self.config.vocabulary, (samples, self.length + 1), generator=generator)
            return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

        return Own(build, batch, "tokens", self.length, init_module)


def _catalogued(name: str) -> GPTConfig:
    config = WORKLOADS[name].config
    assert isinstance(config, GPTConfig)
    return config


SIZES: Mapping[str, Size] = {
    "gpt3-1.3b": Size(_catalogued("gpt3-1.3b"), 8, 1024),
    # Twelve tensors a block, eight of them of at most 2,048 elements: 1,204 in all, and the 350 million of GPT-3's.
    "gpt-350m-100-layers": Size(GPTConfig(50_257, 1024, 512, 100, 8), 8, 1024),
    "gpt2-124m": Size(_catalogued("gpt2-124m"), 8, 1024),
    # A device computes it faster than a host launches it.
    "gpt-24-narrow-layers": Size(GPTConfig(256, 64, 256, 24, 4), 2, 64),
    # For hosts that try a part.
    "gpt-tiny": Size(_catalogued("gpt-tiny"), 2, 16),
    "gpt-tiny-many-layers": Size(GPTConfig(256, 64, 32, 6, 2), 2, 16),
}


gpt3_1_3b = SIZES["gpt3-1.3b"].own
gpt_350m_100_layers = SIZES["gpt-350m-100-layers"].own
gpt2_124m = SIZES["gpt2-124m"].own
gpt_24_narrow_layers = SIZES["gpt-24-narrow-layers"].own
gpt_tiny = SIZES["gpt-tiny"].own
gpt_tiny_many_layers = SIZES["gpt-tiny-many-layers"].own
"""The factories, as `Settings.model` names them."""


def model_named(name: str) -> str:
    """What `Settings.model` calls the model of `SIZES` with this name."""
    return f"{__name__}:{name.replace('-', '_').replace('.', '_')}"


def name_of(model: str) -> str:
    """The name in `SIZES` of a `Settings.model`; raises `UsageError` for another one."""
    for name in SIZES:
        if model_named(name) == model:
            return name
    raise UsageError(f"model {model!r} is none of {', '.join(SIZES)}")


def load_sized(settings: Settings) -> Loaded:
    """The workload, whose FLOPs are those of the formula for its configuration."""
    size = SIZES[name_of(settings.model)]
    return replace(load(settings), workload=Workload(settings.model, size.config))
