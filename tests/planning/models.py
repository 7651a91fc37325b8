"""Models to plan: what zerokit's catalogue does not know, and what no plan can be made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from zerokit.bench.catalogue.workloads import ResNetConfig
from zerokit.bench.plans.subjects import OwnLoss
from zerokit.bench.workloads.library import make_library
from zerokit.bench.workloads.own import Own

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 2000,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def qwen() -> Own:
    """A Qwen2 of transformers, with transformers' loss."""
    import transformers

    causal: Any = transformers.AutoModelForCausalLM
    known = {name: value for name, value in QWEN.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model("qwen2", **known)

    def batch(generator: torch.Generator, samples: int) -> tuple[Tensor, ...]:
        tokens = torch.randint(2000, (samples, 64), generator=generator)
        return tokens, tokens

    return Own(lambda: OwnLoss(causal.from_config(config)), batch, "tokens", 64)


def residual() -> Own:
    """ResNet's blocks, few and narrow."""
    config = ResNetConfig((1, 1, 2, 1), (64, 128, 256, 512), stem=32)

    def batch(generator: torch.Generator, samples: int) -> tuple[Tensor, ...]:
        images = torch.randn(samples, 3, 32, 32, generator=generator)
        return images, torch.randint(config.classes, (samples,), generator=generator)

    return Own(lambda: make_library(config), batch, "images")


class Branching(nn.Module):
    """Looks at its values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.linear(inputs)
        return hidden.sum() if hidden.sum().item() > 0 else hidden.mean()


class Contrastive(nn.Linear):
    """Compares all samples with all others."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = super().forward(inputs)
        return (hidden @ hidden.T).logsumexp(1).mean()


class Mixing(nn.Linear):
    """Multiplies matrices of two dtypes."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.double()[None].bmm(self.weight[None]).sum()


def _features(generator: torch.Generator, samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(samples, 4, generator=generator),)


class Dropping(nn.Module):
    """Two blocks with dropout, behind attention with dropout, whose function is imported by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.Dropout(0.1), nn.Linear(512, 256)) for _ in range(2)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        heads = self.blocks[0](inputs).view(len(inputs), 4, 8, 8)
        attended = scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        loss: Tensor = self.blocks[1](attended.flatten(1)).square().mean()
        return loss


def dropping() -> Own:
    """A model with dropout in what is recomputed."""
    return Own(Dropping, lambda generator, samples: (torch.randn(samples, 256, generator=generator),))


def branching() -> Own:
    """A model that cannot be traced."""
    return Own(Branching, _features)


def no_loss() -> Own:
    """A model without a loss."""
    return Own(lambda: nn.Linear(4, 4), _features)


def contrastive() -> Own:
    """A model whose activations grow with the square of its samples."""
    return Own(lambda: Contrastive(4, 4), _features)


def mixing() -> Own:
    """A model that no step can run."""
    return Own(lambda: Mixing(4, 4), _features)


def double() -> Own:
    """A model in a dtype that no step computes in."""

    class Net(Branching):
        def __init__(self) -> None:
            super().__init__()
            self.linear.double()

    return Own(Net, _features)


def fours() -> Own:
    """A model of micro-batches of four."""

    def batch(generator: torch.Generator, samples: int) -> tuple[Tensor, ...]:
        if samples % 4:
            raise ValueError("four by four")
        return _features(generator, samples)

    return Own(Branching, batch)


def labelled() -> Own:
    """A model whose micro-batch holds no tensor."""
    return Own(Branching, lambda generator, samples: (*_features(generator, samples), "label"))  # type: ignore[arg-type]


def squares() -> Own:
    """A model whose micro-batch grows with the square of its samples."""
    return Own(Branching, lambda generator, samples: _features(generator, samples**2))
