# mypy: disable-error-code="no-any-return"
"""Hooks of the user's own, and losses of what they see."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import CLIPPED, USUAL, Subject, always, usage
from tests.runtime.patterns.models import WIDTH, Block, Mlp, square

pattern = Subject(__name__)

SECOND = always(usage("blocks.1", "register_post_accumulate_grad_hook", "gathered_gradients()"))


@pattern("forward hooks and pre-hooks that change what passes", Mlp)
def forward_hooks(engine: Engine) -> None:
    for block in engine.model.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        block.register_forward_hook(lambda module, args, output: output * 0.5)
    engine.model.register_forward_hook(lambda module, args, output: output + 1.0)
    CLIPPED(engine)


@pattern("full backward hooks and pre-hooks that read and change gradients", Mlp)
def backward_hooks(engine: Engine) -> None:
    for block in engine.model.blocks:
        block.register_full_backward_hook(lambda module, inside, outside: (inside[0] * 0.5,))
        block.register_full_backward_pre_hook(lambda module, outside: (outside[0] * 1.5,))
        block.register_full_backward_hook(lambda module, inside, outside: engine.record(inside[0].norm()))
    engine.model.head.register_full_backward_hook(
        lambda module, inside, outside: engine.record(outside[0].norm())
    )
    CLIPPED(engine)


@pattern.each_step("tensor hooks on an output", Mlp)
def tensor_hooks(engine: Engine) -> None:
    y = engine.model(engine.data(4, 8))
    y.register_hook(lambda gradient: 2 * gradient)
    engine.update(square(y))


@pattern("features taken by a forward hook, used in the loss", Mlp)
def features_in_loss(engine: Engine) -> None:
    taken: list[Tensor] = []
    engine.model.blocks[1].register_forward_hook(lambda module, args, output: taken.append(output))
    for _ in range(STEPS):
        taken.clear()
        loss = square(engine.model(engine.data(4, 8)))
        engine.update(loss + 0.1 * taken[0].abs().mean())


@pattern("a loss of hooked features alone, the output unused", Mlp)
def features_alone(engine: Engine) -> None:
    taken: list[Tensor] = []
    engine.model.blocks[1].register_forward_hook(lambda module, args, output: taken.append(output))
    for _ in range(STEPS):
        taken.clear()
        engine.model(engine.data(4, 8))
        engine.update(square(taken[0]))


class Balanced(Block):
    """Leaves a loss behind, as a mixture of experts does."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.auxiliary = y.mean().square()
        return y


@pattern.each_step(
    "auxiliary losses left on modules, added later", lambda: nn.Sequential(*(Balanced() for _ in range(3)))
)
def auxiliary(engine: Engine) -> None:
    loss = square(engine.model(engine.data(4, WIDTH)))
    engine.update(loss + sum(block.auxiliary for block in engine.model))


def _watched(engine: Engine) -> None:
    for parameter in engine.model.blocks[1].parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: engine.record(p.grad is not None))


@pattern("a post-accumulate hook of the user's, one backward a step", Mlp)
def accumulated_once(engine: Engine) -> None:
    _watched(engine)
    CLIPPED(engine)


@pattern("a post-accumulate hook of the user's, a second micro-batch", Mlp, refused=SECOND)
def accumulated_twice(engine: Engine) -> None:
    _watched(engine)
    for _ in range(STEPS):
        engine.backward(square(engine.model(engine.data(4, 8))))
        engine.update(square(engine.model(engine.data(4, 8))))


@pattern(
    "a post-accumulate hook of the user's, a second micro-batch inside `accumulate()`", Mlp, refused=SECOND
)
def accumulated_inside(engine: Engine) -> None:
    _watched(engine)
    for _ in range(STEPS):
        with engine.accumulate():
            engine.backward(square(engine.model(engine.data(4, 8))))
        engine.update(square(engine.model(engine.data(4, 8))))


class Slices(Mlp):
    """Weights that are slices of one tensor, with hooks that were registered before zerokit took them over."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2, 8, 8) / 4
        self.left, self.right = nn.Parameter(both[0]), nn.Parameter(both[1])
        self.left.register_hook(lambda gradient: 3 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.left @ self.right)


pattern("a gradient hook on a slice of a larger tensor, registered first", Slices)(USUAL, "hook_on_slice")
