# mypy: disable-error-code="no-any-return"
"""How a model is built and walked through."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.patterns.engines import VARIED_STEPS, Engine
from tests.runtime.patterns.harness import CLIPPED, Subject, always, usage, usual
from tests.runtime.patterns.models import WIDTH, Block, Mlp, chain, square

pattern = Subject(__name__)


class Direct(Mlp):
    """Parameters right on the root, in a list and in a dictionary, beside buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.mixing = nn.Parameter(torch.eye(WIDTH))
        self.listed = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.eye(WIDTH))})
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("hidden_", torch.ones(WIDTH), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        x = super().features(x) * self.scale @ self.mixing + self.listed[0] * self.hidden_
        return x @ self.named["a"] + self.listed[1]


pattern("parameters on the root, ParameterList, ParameterDict, buffers", Direct)(CLIPPED, "direct")


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Deep(depth - 1) if depth else nn.Linear(WIDTH, WIDTH))
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.weight


pattern("Sequentials nested in Sequentials", lambda: Deep(4))(usual(4, WIDTH, max_norm=0.1), "deep")


class Choice(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleDict({name: Block() for name in "ab"})

    def forward(self, x: Tensor, name: str) -> Tensor:  # type: ignore[override]
        return self.head(self.choices[name](self.features(x)))


@pattern("ModuleDict, another entry at each step", Choice)
def module_dict(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        engine.update(square(engine.model(engine.data(4, 8), "ab"[step % 2])))


class Twice(Mlp):
    """One module at two places, and one block called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])
        self.other = self.blocks[1]

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        for _ in range(3):
            x = self.other(x)
        return x


pattern("a module at several places, a block called several times", Twice)(CLIPPED, "shared_module")


class Loop(Mlp):
    def forward(self, x: Tensor, times: int) -> Tensor:  # type: ignore[override]
        x = self.first(x)
        for _ in range(times):
            x = self.blocks[1](self.blocks[0](x))
        return self.head(self.blocks[2](x))


@pattern("blocks in a loop, its length changing from step to step", Loop)
def loop(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        engine.update(square(engine.model(engine.data(4, 8), (3, 1, 0, 4)[step])))


class Ordered(Mlp):
    order: tuple[int, ...] = (0, 1, 2)

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place in self.order:
            x = self.blocks[place](x)
        return x


def _orders(engine: Engine, *orders: tuple[int, ...]) -> None:
    for order in orders:
        engine.model.order = order
        engine.update(square(engine.model(engine.data(4, 8))))


pattern("units in another order at each step", Ordered)(
    lambda engine: _orders(engine, (0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (2, 0, 1)), "reordered"
)
pattern("units left out, others at each step", Ordered)(
    lambda engine: _orders(engine, (0, 1, 2), (0, 2), (1,), (), (2,), (0, 1, 2)), "left_out"
)
pattern("units left out in the first step", Ordered)(
    lambda engine: _orders(engine, (1,), (0, 1, 2), (2, 0), (1, 1, 1)), "left_out_first"
)


class Branches(Mlp):
    """Parallel branches, joined by a sum; one is computed before and used after the others."""

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        early = self.blocks[2](x)
        return x + self.blocks[0](x) + self.blocks[1](x) * early


pattern("parallel branches beside a skip", Branches)(CLIPPED, "branches")
pattern("a single Linear", lambda: nn.Linear(WIDTH, WIDTH))(usual(4, WIDTH, max_norm=0.1), "single_linear")


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


pattern("a model of one number", One)(CLIPPED, "one_number")


class Unequal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 257, 1, 64, 2, 128, 8)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + 0.1
        return x


pattern("layers of very unequal sizes", Unequal)(usual(4, 3, max_norm=0.1), "unequal")


class Autoencoder(Mlp):
    """The decoder multiplies by the encoder's weights, transposed."""

    def forward(self, x: Tensor) -> Tensor:
        blocks: Any = self.blocks
        code = self.features(x)
        for block in reversed(blocks):
            code = torch.tanh(F.linear(code, block.inner.weight.t()))
        return F.linear(code, self.first.weight.t())


pattern("an autoencoder whose decoder transposes the encoder's weights", Autoencoder)(CLIPPED, "autoencoder")


class Hypernetwork(nn.Module):
    """One network makes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = chain(2)
        self.last = nn.Linear(WIDTH, 8 * WIDTH)
        self.code = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.last(self.maker(self.code)).view(WIDTH, 8)
        return self.head(torch.tanh(F.linear(x, weight)))


pattern("a hypernetwork", Hypernetwork)(CLIPPED, "hypernetwork")


class Scanned(Mlp):
    """Stacks weights of all blocks at the start, as a scan over layers does."""

    def features(self, x: Tensor) -> Tensor:
        blocks: Any = self.blocks
        weights = torch.stack([block.inner.weight for block in blocks])
        x = self.first(x)
        for weight in weights:
            x = x + torch.tanh(x @ weight.t())
        return x


pattern("weights of all blocks stacked inside forward, no block called", Scanned)(CLIPPED, "scanned")
pattern("units chosen by `units=nn.Linear`", Mlp, options={"units": nn.Linear})(CLIPPED, "units_of_a_class")
pattern("units of two classes", Mlp, options={"units": (Block, nn.Linear)})(CLIPPED, "units_of_classes")
pattern("units chosen by a function", Mlp, options={"units": lambda module: isinstance(module, Block)})(
    CLIPPED, "units_by_function"
)
pattern("the whole model as a unit", Mlp, options={"units": lambda module: True})(CLIPPED, "root_as_unit")


class Shared(Mlp):
    """Two weights that share memory without being one parameter."""

    def __init__(self, share: Callable[[Mlp], None]) -> None:
        super().__init__()
        share(self)


def _transposed(model: Mlp) -> None:
    model.head.weight = nn.Parameter(model.first.weight.data.t())


def _sliced(model: Mlp) -> None:
    model.head.bias = nn.Parameter(model.first.bias.data[:8])


def _as_buffer(model: Mlp) -> None:
    model.register_buffer("copy_of_bias", model.head.bias.data)


def _as_attribute(model: Mlp) -> None:
    model.seen = model.head.weight.detach()


def _apart(model: Mlp) -> None:
    rows = torch.randn(128, 64) / 64
    for place in (0, 1):
        model.get_submodule(f"blocks.{place}.inner").weight = nn.Parameter(rows[64 * place : 64 * place + 64])


SHARED = always(usage("share memory", "clone()"))


pattern("a weight tied by `.data.t()`", lambda: Shared(_transposed), refused=SHARED)(
    CLIPPED, "tied_transposed"
)
pattern("a bias tied by `.data[:8]`", lambda: Shared(_sliced), refused=SHARED)(CLIPPED, "tied_slice")
pattern("a buffer over a parameter's memory", lambda: Shared(_as_buffer), refused=SHARED)(
    CLIPPED, "buffer_over"
)
pattern("an attribute over a parameter's memory", lambda: Shared(_as_attribute), refused=SHARED)(
    CLIPPED, "attribute_over"
)
pattern("parameters in one memory that share no element of it", lambda: Shared(_apart))(CLIPPED, "fused")


@pattern(
    "a float64 parameter",
    lambda: Mlp().double(),
    refused=always(usage("float64", "model.float()")),
)
def float64(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data(4, 8).double())))
