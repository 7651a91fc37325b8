# mypy: disable-error-code="no-any-return"
"""Modules of torch's library, and models made of them."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.runtime.patterns.engines import Engine
from tests.runtime.patterns.harness import CLIPPED, Refused, Subject, always, updates, usual
from tests.runtime.patterns.models import WIDTH, Block, Mlp, Words, chain, square

pattern = Subject(__name__)

WIDE, IMAGES = usual(4, WIDTH, max_norm=0.1), (4, 3, 8, 8)


class First(nn.Module):
    """What an LSTM returns, without its state."""

    def forward(self, pair: Any) -> Tensor:
        return pair[0]


pattern(
    "GRU, two layers, both directions, and LSTM, units of a Sequential",
    lambda: nn.Sequential(
        *[nn.Linear(8, WIDTH), nn.GRU(WIDTH, WIDTH // 2, 2, bidirectional=True), First()],
        *[nn.LSTM(WIDTH, WIDTH), First(), nn.Linear(WIDTH, 8)],
    ),
)(usual(5, 2, 8, max_norm=0.1), "recurrent")


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _evaluated(engine: Engine, *shape: int) -> None:
    engine.update(square(engine.model(engine.data(*shape)) - 1))
    engine.model.eval()
    engine.evaluate(engine.data(*shape))
    engine.model.train()


pattern.each_step("TransformerEncoder with dropout, evaluated in between (torch's fast path)", _encoder)(
    lambda engine: _evaluated(engine, 2, 5, WIDTH), "encoder"
)


def _convolutions(norm: Any, *sizes: int) -> nn.Module:
    return nn.Sequential(
        *[nn.Conv2d(3, 32, 3, padding=1), norm(*sizes), nn.ReLU(inplace=True)],
        *[nn.Conv2d(32, 32, 3, stride=2), norm(*sizes), nn.ReLU(inplace=True)],
        *[nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8)],
    )


pattern.each_step(
    "convolutions with BatchNorm, evaluated with its running averages, and ReLU in place",
    lambda: _convolutions(nn.BatchNorm2d, 32),
)(lambda engine: _evaluated(engine, *IMAGES), "batch_norm")


@pattern.each_step("GroupNorm, channels-last inputs and weights", lambda: _convolutions(nn.GroupNorm, 4, 32))
def channels_last(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data(*IMAGES).to(memory_format=torch.channels_last))))


@pattern.each_step("Embedding with `padding_idx`", lambda: Words(padding_idx=0))
def padding_index(engine: Engine) -> None:
    engine.update(square(engine.model(engine.ids(80, 2, 6) * (engine.ids(2, 2, 6) > 0))))


@pattern.each_step("Embedding with `max_norm`, which changes weights in forward", lambda: Words(max_norm=1.0))
def embedding_max_norm(engine: Engine) -> None:
    ids = torch.arange(12).view(2, 6)  # alike on all ranks, as what it changes is
    engine.update(square(engine.model(ids)) * (1 + engine.rank))


@pattern(
    "Embedding with `sparse=True`",
    lambda: Words(sparse=True),
    refused=always(Refused("ZerokitError", ("sparse=False",))),
)
def sparse(engine: Engine) -> None:
    loss = square(engine.model(engine.ids(80, 2, 6)))
    engine.record(loss)
    if not engine.plain:
        engine.update(loss)


pattern("EmbeddingBag", lambda: nn.Sequential(nn.EmbeddingBag(80, WIDTH), Block(), nn.Linear(WIDTH, 8)))(
    updates(lambda engine: square(engine.model(engine.ids(80, 4, 3)))), "embedding_bag"
)
pattern(
    "dropout", lambda: nn.Sequential(nn.Linear(8, WIDTH), nn.Dropout(0.3), Block(), nn.Dropout(), Block())
)(CLIPPED, "dropout")


def _parametrized(how: Any) -> nn.Module:
    model = chain(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the older weight norm
        for block in model:
            how(block.get_submodule("inner"))
    return model


_weight_norm = partial(_parametrized, parametrizations.weight_norm)
pattern("spectral norm (parametrization)", partial(_parametrized, parametrizations.spectral_norm))(
    WIDE, "spectral_norm"
)
pattern("weight norm, the older one of hooks", partial(_parametrized, nn.utils.weight_norm))(
    WIDE, "old_weight_norm"
)


@pattern.each_step("a parametrized weight, cached for a forward", _weight_norm)
def cached_weight_norm(engine: Engine) -> None:
    with nn.utils.parametrize.cached():
        x = engine.model(engine.model(engine.data(4, WIDTH)))
    engine.update(square(x))


@pattern.each_step("a parametrized weight assigned (`layer.weight = …`) inside `gathered()`", _weight_norm)
def assigned_weight_norm(engine: Engine) -> None:
    engine.update(engine.loss(4, WIDTH))
    with engine.gathered(), torch.no_grad():
        for block in engine.model:
            block.inner.weight = 0.9 * block.inner.weight


class Adapted(nn.Module):
    """LoRA: a frozen layer and a trained low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted() -> nn.Module:
    return nn.Sequential(*(Adapted() for _ in range(3)))


def _frozen(*parts: str) -> nn.Module:
    model = Mlp()
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(parts))
    return model


pattern(
    "LoRA: a frozen base, only the adapters given as `params`",
    adapted,
    params=lambda model: [p for p in model.parameters() if p.requires_grad],
)(WIDE, "lora_parameters")
pattern("frozen: the first layer, a whole unit, a bias", partial(_frozen, "first", "blocks.1", "head.bias"))(
    CLIPPED, "partly_frozen"
)
pattern(
    "everything behind the first unit frozen (prompt tuning)",
    partial(_frozen, "blocks.1", "blocks.2", "head"),
)(CLIPPED, "frozen_behind")


def _meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH), Block(), Block(), nn.Linear(WIDTH, 8))


# Torch would initialise in another order; stage 0 is what the others must equal.
pattern("a model built on the `meta` device", _meta, reference="stage 0")(CLIPPED, "meta_device")
pattern("units called inside `torch.vmap`")(
    updates(lambda engine: square(torch.vmap(engine.model)(engine.data()))), "vmap"
)


@pattern.features("each unit under `torch.vmap` inside forward")
def vmap_units(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for block in model.blocks:
        x = torch.vmap(block)(x)
    return x


@pattern("inside `torch.profiler.profile`")
def profiled(engine: Engine) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        CLIPPED(engine)
