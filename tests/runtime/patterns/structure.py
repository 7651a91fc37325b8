# mypy: disable-error-code="no-any-return"
"""How a model is built and walked through."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.patterns.engines import Engine
from tests.runtime.patterns.harness import CLIPPED, Subject, always, usage, usual
from tests.runtime.patterns.models import WIDTH, Block, Mlp, square

pattern = Subject(__name__)


@pattern.model("parameters on the root, ParameterList, ParameterDict, buffers, a sparse attribute")
class Direct(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.mixing = nn.Parameter(torch.eye(WIDTH))
        self.listed = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.eye(WIDTH))})
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("hidden_", torch.ones(WIDTH), persistent=False)
        self.adjacency = torch.eye(WIDTH).to_sparse()

    def features(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        x = super().features(x) * self.scale @ self.mixing + self.listed[0] * self.hidden_
        return torch.sparse.mm(self.adjacency, (x @ self.named["a"]).t()).t() + self.listed[1]


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Deep(depth - 1) if depth else nn.Linear(WIDTH, WIDTH))
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.weight


WIDE = usual(4, WIDTH, max_norm=0.1)
pattern("Sequentials nested in Sequentials", lambda: Deep(4))(WIDE, "deep")
pattern("a single Linear", lambda: nn.Linear(WIDTH, WIDTH))(WIDE, "single_linear")


# The columns' stage is that of the other modules.
OWN_STAGES: dict[str, Any] = {"options": {"stages": {"blocks.0": 3, "blocks.1": 2, "head": 0}}}
pattern('`stage={"blocks.0": 3, "blocks.1": 2, "head": 0, "*": …}`', Mlp, **OWN_STAGES)(CLIPPED, "own_stages")


def _frozen_base() -> Mlp:
    model = Mlp()
    model.first.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    return model


OWN_STAGES = {"options": {"stages": {"first": 3, "blocks": 3}}}
pattern("a frozen base at stage 3", _frozen_base, **OWN_STAGES)(CLIPPED, "frozen_base")


@pattern.model("a module at several places, a block called several times")
class Twice(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])
        self.other = self.blocks[1]

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        for _ in range(3):
            x = self.other(x)
        return x


def _in_orders(*orders: tuple[int, ...]) -> Callable[[Engine], None]:
    """Trains with blocks in these orders, one a step."""

    def train(engine: Engine) -> None:
        for order in orders:
            engine.model.blocks_in_use = order
            engine.train()

    return train


class Ordered(Mlp):
    blocks_in_use: tuple[int, ...] = ()

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place in self.blocks_in_use:
            x = self.blocks[place](x)
        return x


pattern("units in another order at each step", Ordered)(
    _in_orders((0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (2, 0, 1)), "reordered"
)
pattern("units left out, others at each step", Ordered)(
    _in_orders((0, 1, 2), (0, 2), (1,), (), (2,), (0, 1, 2)), "left_out"
)
pattern("units left out in the first step", Ordered)(
    _in_orders((1,), (0, 1, 2), (2, 0), (1, 1, 1)), "left_out_first"
)
pattern("blocks in a loop, its length changing from step to step", Ordered)(
    _in_orders(*((0, 1) * times + (2,) for times in (3, 1, 0, 4))), "loop"
)


@pattern.features("parallel branches beside a skip, one computed before and used after the others")
def branches(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    early = model.blocks[2](x)
    return x + model.blocks[0](x) + model.blocks[1](x) * early


@pattern.features("weights of all blocks stacked inside forward, as a scan does, no block called")
def scanned(model: Any, x: Tensor) -> Tensor:
    weights = torch.stack([block.inner.weight for block in model.blocks])
    x = model.first(x)
    for weight in weights:
        x = x + torch.tanh(x @ weight.t())
    return x


UNITS: dict[str, tuple[str, Any]] = {
    "units_of_a_class": ("units of two classes, `units=(Block, nn.Linear)`", (Block, nn.Linear)),
    "units_by_function": ("units chosen by a function", lambda module: isinstance(module, Block)),
    "root_as_unit": ("the whole model as a unit", lambda module: True),
}
for key, (name, units) in UNITS.items():
    pattern(name, options={"units": units})(CLIPPED, key)


def _changed(change: Callable[[Any], Any]) -> Mlp:
    model = Mlp()
    change(model)
    return model


def _transpose(model: Mlp) -> None:
    model.head.weight = nn.Parameter(model.first.weight.data.t())


def _slice(model: Mlp) -> None:
    model.head.bias = nn.Parameter(model.first.bias.data[:8])


def _take_rows(model: Mlp) -> None:
    rows = torch.randn(128, 64) / 64
    for place in (0, 1):
        model.get_submodule(f"blocks.{place}.inner").weight = nn.Parameter(rows[64 * place : 64 * place + 64])


def _take_columns(model: Mlp) -> None:
    columns = torch.randn(64, 128) / 64
    for place in (0, 1):
        weight = nn.Parameter(columns[:, 64 * place : 64 * place + 64])
        model.get_submodule(f"blocks.{place}.inner").weight = weight


SHARING: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "tied_transposed": ("a weight tied by `.data.t()`", _transpose),
    "tied_slice": ("a bias tied by `.data[:8]`", _slice),
    "buffer_over": (
        "a buffer over a parameter's memory",
        lambda model: model.register_buffer("copy_of_bias", model.head.bias.data),
    ),
    "columns": ("parameters that interleave in one memory, as the columns of a fused weight", _take_columns),
    "attribute_over": (
        "an attribute over a parameter's memory",
        lambda model: setattr(model, "seen", model.head.weight.detach()),
    ),
}
for key, (name, share) in SHARING.items():
    pattern(name, partial(_changed, share), refused=always(usage("share memory", "clone()")))(CLIPPED, key)
pattern("parameters in one memory that share no element of it", partial(_changed, _take_rows))(
    CLIPPED, "fused"
)


@pattern("a float64 parameter", lambda: Mlp().double(), refused=always(usage("float64", "model.float()")))
def float64(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data().double())))
