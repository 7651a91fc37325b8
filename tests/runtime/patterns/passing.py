# mypy: disable-error-code="no-any-return"
"""What goes in and out of modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.runtime.patterns.engines import Engine
from tests.runtime.patterns.harness import CLIPPED, Subject
from tests.runtime.patterns.models import Block, Mlp, square

pattern = Subject(__name__)


@dataclass
class Record:
    hidden: Tensor
    loss: Tensor


class Plainly:
    """A class that nobody knows how to look into."""

    def __init__(self, hidden: Tensor, loss: Tensor) -> None:
        self.hidden, self.loss = hidden, loss


class Slotted:
    __slots__ = ("hidden", "loss")

    def __init__(self, hidden: Tensor, loss: Tensor) -> None:
        self.hidden, self.loss = hidden, loss


class Wrapping(Block):
    """Takes and returns `kind`."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, value: Any) -> Any:
        hidden = super().forward(value.hidden)
        return self.kind(hidden=hidden, loss=value.loss + hidden.mean().square())


class Through(Mlp):
    """Blocks that hand `kind` on; the model returns it, too."""

    def __init__(self, kind: Any) -> None:
        super().__init__(block=partial(Wrapping, kind))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        value = self.kind(hidden=self.first(x), loss=x.new_zeros(()))
        for block in self.blocks:
            value = block(value)
        return value


def _objects(engine: Engine) -> None:
    value = engine.model(engine.data())
    engine.update(square(value.hidden) + 0.1 * value.loss)


for kind, name in (
    (Record, "a dataclass"),
    (Plainly, "a plain class"),
    (Slotted, "a class with slots"),
):
    pattern.each_step(f"units that take and return {name}", partial(Through, kind))(_objects, kind.__name__)


class Dicts(Block):
    def forward(self, *, state: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:  # type: ignore[override]
        return {"x": [super().forward(state["x"][0] * scale)], "nothing": None}


class KeywordsOnly(Mlp):
    """Dictionaries of lists, keywords only."""

    def forward(self, *, batch: dict[str, Tensor], **kwargs: Any) -> Any:  # type: ignore[override]
        state: dict[str, Any] = {"x": [self.first(batch["x"])]}
        for block in self.blocks:
            state = block(state=state, scale=0.9)
        return {"logits": self.head(state["x"][0]), "nothing": None}


@pattern.each_step(
    "dictionaries in and out, keywords only, `None` among the outputs", lambda: KeywordsOnly(block=Dicts)
)
def dictionaries(engine: Engine) -> None:
    engine.update(square(engine.model(batch={"x": engine.data()}, unused=None)["logits"]))


class Stores(Block):
    """Returns nothing: what it makes is left in a list that the caller gave."""

    def forward(self, x: Tensor, out: list[Tensor]) -> None:  # type: ignore[override]
        out.append(super().forward(x))


def _collect(model: Any, x: Tensor) -> Tensor:
    found = [model.first(x)]
    for block in model.blocks:
        block(found[-1], found)
    return found[-1]


class Sliced(Block):
    """Returns views of one tensor."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).chunk(2, -1)


def _join_views(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for block in model.blocks:
        left, right = block(x)
        x = torch.cat([left.mul(0.5), right], -1)
    return x


class Same(Block):
    """Hands one of its inputs through."""

    def forward(self, x: Tensor, bias: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) + bias, bias


def _hand_through(model: Any, x: Tensor) -> Tensor:
    x, bias = model.first(x), model.first.bias * 1.0
    for block in model.blocks:
        x, bias = block(x, bias)
    return x + bias


for key, name, block, features in (
    ("into_a_list", "units that return `None` and write into a list", Stores, _collect),
    ("views", "units that return views", Sliced, _join_views),
    ("handed_through", "units that hand an input through (T5's position bias)", Same, _hand_through),
):
    pattern(name, partial(Mlp, block=block, features=features))(CLIPPED, key)


@pattern.features("outputs of units changed in place by the parent")
def in_place(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for block in model.blocks:
        x = block(x)
        x += 0.1
        x = F.relu_(x)
    return x


class Steps(Mlp):
    """A generator: yields what every block makes."""

    def forward(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            yield self.head(x)


@pattern.each_step("a forward that is a generator", Steps)
def generator(engine: Engine) -> None:
    outputs = list(engine.model(engine.data()))
    engine.update(sum((square(y) for y in outputs), start=torch.zeros(())))
