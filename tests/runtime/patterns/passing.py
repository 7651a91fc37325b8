# mypy: disable-error-code="no-any-return"
"""What goes in and out of modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import CLIPPED, Subject
from tests.runtime.patterns.models import WIDTH, Block, Mlp, square

pattern = Subject(__name__)


@dataclass
class Record:
    hidden: Tensor
    loss: Tensor


class Pair(NamedTuple):
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


class Through(nn.Module):
    """Blocks that hand `kind` on; the model returns it, too."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Wrapping(kind) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        value = self.kind(hidden=self.first(x), loss=x.new_zeros(()))
        for block in self.blocks:
            value = block(value)
        return value


def _objects(engine: Engine) -> None:
    for _ in range(STEPS):
        value = engine.model(engine.data(4, 8))
        engine.update(square(value.hidden) + 0.1 * value.loss)


pattern("units that take and return a dataclass", lambda: Through(Record))(_objects, "dataclasses_")
pattern("units that take and return a named tuple", lambda: Through(Pair))(_objects, "named_tuples")
pattern("units that take and return a plain class", lambda: Through(Plainly))(_objects, "plain_classes")
pattern("units that take and return a class with slots", lambda: Through(Slotted))(
    _objects, "slotted_classes"
)


class Dicts(Block):
    def forward(self, *, state: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:  # type: ignore[override]
        return {"x": [super().forward(state["x"][0] * scale)], "nothing": None}


class KeywordsOnly(Mlp):
    """Dictionaries of lists, keywords only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dicts() for _ in range(3))

    def forward(self, *, batch: dict[str, Tensor], **kwargs: Any) -> Any:  # type: ignore[override]
        state: dict[str, Any] = {"x": [self.first(batch["x"])]}
        for block in self.blocks:
            state = block(state=state, scale=0.9)
        return {"logits": self.head(state["x"][0]), "nothing": None}


@pattern.each_step("dictionaries in and out, keywords only, `None` among the outputs", KeywordsOnly)
def dictionaries(engine: Engine) -> None:
    engine.update(square(engine.model(batch={"x": engine.data(4, 8)}, unused=None)["logits"]))


class Tuples(Block):
    def forward(self, *args: Any) -> Any:
        x, skip, nothing = args
        return super().forward(x), x + skip, nothing


class Positional(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tuples() for _ in range(3))

    def forward(self, *args: Tensor) -> Any:
        state = (self.first(args[0]), self.first(args[1]), None)
        for block in self.blocks:
            state = block(*state)
        return self.head(state[0]), self.head(state[1]), None


@pattern.each_step("tuples in and out, `*args`", Positional)
def tuples(engine: Engine) -> None:
    one, two, _ = engine.model(engine.data(4, 8), engine.data(4, 8))
    engine.update(square(one) + square(two))


class Stores(Block):
    """Returns nothing: what it makes is left in a list that the caller gave."""

    def forward(self, x: Tensor, out: list[Tensor]) -> None:  # type: ignore[override]
        out.append(super().forward(x))


class Collected(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stores() for _ in range(3))

    def features(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for block in self.blocks:
            block(found[-1], found)
        return found[-1]


pattern("units that return `None` and write into a list", Collected)(CLIPPED, "into_a_list")


class Sliced(Block):
    """Returns views of one tensor, which the parent changes in place."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).chunk(2, -1)


class Views(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sliced() for _ in range(3))

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            left, right = block(x)
            x = torch.cat([left.mul(0.5), right], -1)
        return x


pattern("units that return views", Views)(CLIPPED, "views")


class InPlace(Mlp):
    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x += 0.1
            x = F.relu_(x)
        return x


pattern("outputs of units changed in place by the parent", InPlace)(CLIPPED, "in_place")


class Same(Block):
    """Hands one of its inputs through."""

    def forward(self, x: Tensor, bias: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) + bias, bias


class HandedThrough(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(Same() for _ in range(3))

    def features(self, x: Tensor) -> Tensor:
        x, bias = self.first(x), self.bias * 1.0
        for block in self.blocks:
            x, bias = block(x, bias)
        return x + bias


pattern("units that hand an input through (T5's position bias)", HandedThrough)(CLIPPED, "handed_through")


class Steps(Mlp):
    """A generator: yields what every block makes."""

    def forward(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            yield self.head(x)


@pattern.each_step("a forward that is a generator", Steps)
def generator(engine: Engine) -> None:
    outputs = list(engine.model(engine.data(4, 8)))
    engine.update(sum((square(y) for y in outputs), start=torch.zeros(())))
