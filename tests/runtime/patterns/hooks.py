# mypy: disable-error-code="no-any-return"
"""Hooks of the user's own, and losses of what they see."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.runtime.patterns.engines import VARIED_STEPS, Engine
from tests.runtime.patterns.harness import CLIPPED, USUAL, Subject, always, usage
from tests.runtime.patterns.models import Mlp, square

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


@pattern("features taken by a forward hook, a loss of them alone or beside that of the output")
def features(engine: Engine) -> None:
    taken: list[Tensor] = []
    engine.model.blocks[1].register_forward_hook(lambda module, args, output: taken.append(output))
    for step in range(VARIED_STEPS):
        loss = engine.loss()
        engine.update(square(taken.pop()) + (0.5 * loss if step // 2 else 0.0))


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
