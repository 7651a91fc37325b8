# mypy: disable-error-code="no-any-return"
"""Activation checkpointing (`use_reentrant=False`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.runtime.patterns.engines import VARIED_STEPS, Engine
from tests.runtime.patterns.harness import CLIPPED, Subject, always, updates, usage, usual
from tests.runtime.patterns.models import WIDTH, Block, Mlp, square

pattern = Subject(__name__)

again = partial(checkpoint, use_reentrant=False)

How = Callable[[Any, Tensor], Tensor]
"""Runs blocks."""


def _recomputed(how: How, block: Any = Block) -> Mlp:
    return Mlp(4, block=block, features=lambda model, x: how(model.blocks, model.first(x)))


def _run(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def each(blocks: Any, x: Tensor, **options: Any) -> Tensor:
    for block in blocks:
        x = again(block, x, **options)
    return x


def every_second(blocks: Any, x: Tensor) -> Tensor:
    for place, block in enumerate(blocks):
        x = again(block, x) if place % 2 else block(x)
    return x


def segments(blocks: Any, x: Tensor) -> Tensor:
    for start in range(0, len(blocks), 2):
        x = again(_run, blocks[start : start + 2], x)
    return x


def sequential(blocks: Any, x: Tensor) -> Tensor:
    return checkpoint_sequential(list(blocks), 2, x, use_reentrant=False)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = operation is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class Dropping(Block):
    """With dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


class Inner(Block):
    """Recomputes a part of itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + again(lambda y: torch.tanh(self.inner(y)), x)


class Looping(nn.Module):
    """Runs one of its two layers twice, in a reentrant checkpoint each."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=True)
        return x


def way(key: str, name: str, how: How, block: type[Block] = Block) -> None:
    pattern(name, partial(_recomputed, how, block))(CLIPPED, key)


way("every_block", "every block", each)
way("alternating", "every second block", every_second)
way("two_blocks", "segments of two blocks", segments)
way("in_sequence", "`checkpoint_sequential`", sequential)
way("around", "a checkpoint around checkpoints", partial(again, segments))
way("whole", "a checkpoint around all blocks", partial(again, _run))
SELECTIVE = partial(create_selective_checkpoint_contexts, _policy)
way("kept_products", "selective: matrix products are kept", partial(each, context_fn=SELECTIVE))
way("dropout", "dropout, the random state preserved", each, Dropping)
way("no_random_state", "without preserving the random state", partial(each, preserve_rng_state=False))
way("inside", "inside each block", _run, Inner)
pattern(
    "`use_reentrant=True`",
    lambda: _recomputed(partial(checkpoint, _run, use_reentrant=True)),
    refused=always(usage("use_reentrant=False", or_right=True)),
    apart=True,
)(CLIPPED, "reentrant")
pattern(
    "`use_reentrant=True`, a layer used twice within a unit",
    lambda: _recomputed(_run, Looping),
    refused=always(usage("use_reentrant=False", or_right=True)),
    apart=True,
)(CLIPPED, "reentrant_twice")
pattern("around the whole model", lambda: Mlp(4))(
    updates(lambda engine: square(again(engine.model, engine.data())), 0.1), "around_the_root"
)
pattern("around the whole model and its loss", lambda: Mlp(4))(
    updates(lambda engine: again(lambda x: square(engine.model(x)), engine.data())), "around_the_loss"
)


@pattern("without early stop", lambda: _recomputed(each))
def no_early_stop(engine: Engine) -> None:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        CLIPPED(engine)


@pattern.each_step("in some steps only", lambda: _recomputed(segments), steps=VARIED_STEPS)
def some_steps(engine: Engine) -> None:
    engine.model.how = _recomputed(_run if engine.number % 3 else segments).how
    engine.train()


@pattern.each_step("with a gradient penalty", lambda: _recomputed(each))
def with_penalty(engine: Engine) -> None:
    x = engine.data().requires_grad_()
    y = engine.model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    engine.update(square(y) + square(slope))


class Tied(Mlp):
    """A head inside a checkpoint, whose weight the first layer uses, too."""

    def __init__(self) -> None:
        super().__init__(2, WIDTH, WIDTH)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return again(self.head, each(self.blocks, self.first(x)))


pattern("tied weights in and out of a checkpoint", Tied)(usual(4, WIDTH), "tied")
