# mypy: disable-error-code="no-any-return"
"""What goes in and out of modules, and hooks of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.patterns.engines import VARIED_STEPS, Engine
from tests.runtime.patterns.harness import CLIPPED, USUAL, Subject, always, usage
from tests.runtime.patterns.models import Block, Mlp, square

pattern = Subject(__name__)


@dataclass
class Record:
    hidden: Tensor
    loss: Tensor


class Wrapping(Block):
    """Takes and returns a record, in dictionaries and lists."""

    def forward(self, *, state: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:  # type: ignore[override]
        (value,) = state["x"]
        hidden = super().forward(value.hidden * scale)
        return {"x": [Record(hidden, value.loss + hidden.mean().square())], "nothing": None}


class Through(Mlp):
    """Keywords only; the model returns what its blocks hand on, too."""

    def forward(self, *, batch: dict[str, Tensor], **kwargs: Any) -> Any:  # type: ignore[override]
        state: dict[str, Any] = {"x": [Record(self.first(batch["x"]), batch["x"].new_zeros(()))]}
        for block in self.blocks:
            state = block(state=state, scale=0.9)
        return state


# test_outputs knows more kinds.
@pattern.each_step(
    "dataclasses in dictionaries in and out, keywords only, `None` among them",
    lambda: Through(block=Wrapping),
)
def records(engine: Engine) -> None:
    (value,) = engine.model(batch={"x": engine.data()}, unused=None)["x"]
    engine.update(square(value.hidden) + 0.1 * value.loss)


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


class Rows(Block):
    """Returns rows of its weight beside."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.inner.weight[-4:]


def _add_rows(model: Any, x: Tensor) -> Tensor:
    x, rows = model.first(x), []
    for block in model.blocks:
        x, own = block(x)
        rows.append(own)
    return x + torch.stack(rows).sum(0)


for key, name, block, how in (
    ("into_a_list", "units that return `None` and write into a list", Stores, _collect),
    ("views", "units that return views", Sliced, _join_views),
    (
        "weight_rows",
        "units that return rows of their weights, which are read after all units",
        Rows,
        _add_rows,
    ),
    ("handed_through", "units that hand an input through (T5's position bias)", Same, _hand_through),
):
    pattern(name, partial(Mlp, block=block, features=how))(CLIPPED, key)


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


SECOND = always(usage("blocks.1", "register_post_accumulate_grad_hook", "gathered_gradients()"))


@pattern("forward hooks and pre-hooks that change what passes")
def forward_hooks(engine: Engine) -> None:
    for block in engine.model.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        block.register_forward_hook(lambda module, args, output: output * 0.5)
    engine.model.register_forward_hook(lambda module, args, output: output + 1.0)
    CLIPPED(engine)


@pattern("full backward hooks and pre-hooks that read and change gradients")
def backward_hooks(engine: Engine) -> None:
    for block in engine.model.blocks:
        block.register_full_backward_hook(lambda module, inside, outside: (inside[0] * 0.5,))
        block.register_full_backward_pre_hook(lambda module, outside: (outside[0] * 1.5,))
        block.register_full_backward_hook(lambda module, inside, outside: engine.record(inside[0].norm()))
    engine.model.head.register_full_backward_hook(
        lambda module, inside, outside: engine.record(outside[0].norm())
    )
    CLIPPED(engine)


@pattern("features taken by a forward hook, a loss of them alone or beside that of the output")
def features(engine: Engine) -> None:
    taken: list[Tensor] = []
    engine.model.blocks[1].register_forward_hook(lambda module, args, output: taken.append(output))
    for step in range(VARIED_STEPS):
        loss = engine.loss()
        engine.update(square(taken.pop()) + (0.5 * loss if step // 2 else 0.0))


class OwnLoss(Block):
    """Computes a loss of its own after its output, as Bayesian layers do with their divergence."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.own = [square(self.inner(y))]
        return y


@pattern.each_step(
    "units that keep a loss as an attribute, computed after their output", lambda: Mlp(block=OwnLoss)
)
def own_losses(engine: Engine) -> None:
    engine.update(
        engine.loss() + sum(block.own[0] for block in engine.model.blocks[engine.number :]), max_norm=0.1
    )


def _watched(engine: Engine) -> None:
    for parameter in engine.model.blocks[1].parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: engine.record(p.grad is not None))


@pattern("a post-accumulate hook of the user's, one backward a step")
def accumulated_once(engine: Engine) -> None:
    _watched(engine)
    CLIPPED(engine)


@pattern("a post-accumulate hook of the user's, a second micro-batch, also in `accumulate()`", refused=SECOND)
def accumulated_twice(engine: Engine) -> None:
    _watched(engine)
    with engine.accumulate() if engine.setting.stage % 2 else nullcontext():
        engine.backward(engine.loss())
    engine.train()


@pattern.model("a gradient hook on a slice of a larger tensor, registered before zerokit took it over", USUAL)
class Slices(Mlp):
    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2, 8, 8) / 4
        self.left, self.right = nn.Parameter(both[0]), nn.Parameter(both[1])
        self.left.register_hook(lambda gradient: 3 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.left @ self.right)
