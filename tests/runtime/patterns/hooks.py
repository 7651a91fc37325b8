# mypy: disable-error-code="no-any-return"
"""Hooks of the user's own, and losses of what they see."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import CLIPPED, USUAL, Subject, always, usage
from tests.runtime.patterns.models import Block, Mlp, square

pattern = Subject(__name__)

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


@pattern.each_step("tensor hooks on an output")
def tensor_hooks(engine: Engine) -> None:
    y = engine.model(engine.data())
    y.register_hook(lambda gradient: 2 * gradient)
    engine.update(square(y))


def _with_features(engine: Engine, weight: float) -> None:
    """The loss of the output, weighted, and of what a hook takes of the second block."""
    taken: list[Tensor] = []
    engine.model.blocks[1].register_forward_hook(lambda module, args, output: taken.append(output))
    for _ in range(STEPS):
        y = engine.model(engine.data())
        loss = square(taken.pop())
        engine.update(loss + weight * square(y) if weight else loss)


pattern("features taken by a forward hook, used in the loss")(
    lambda engine: _with_features(engine, 0.5), "features_in_loss"
)
pattern("a loss of hooked features alone, the output unused")(
    lambda engine: _with_features(engine, 0.0), "features_alone"
)


class Balanced(Block):
    """Leaves a loss behind, as a mixture of experts does."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.auxiliary = y.mean().square()
        return y


@pattern.each_step("auxiliary losses left on modules, added later", lambda: Mlp(block=Balanced))
def auxiliary(engine: Engine) -> None:
    engine.update(engine.loss() + sum(block.auxiliary for block in engine.model.blocks))


def _watched(engine: Engine) -> None:
    for parameter in engine.model.blocks[1].parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: engine.record(p.grad is not None))


@pattern("a post-accumulate hook of the user's, one backward a step")
def accumulated_once(engine: Engine) -> None:
    _watched(engine)
    CLIPPED(engine)


@pattern("a post-accumulate hook of the user's, a second micro-batch", refused=SECOND)
def accumulated_twice(engine: Engine) -> None:
    _watched(engine)
    engine.backward(engine.loss())
    engine.train()


@pattern("a post-accumulate hook of the user's, a second micro-batch inside `accumulate()`", refused=SECOND)
def accumulated_inside(engine: Engine) -> None:
    _watched(engine)
    with engine.accumulate():
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
