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


class Recomputed(Mlp):
    """`how` runs the blocks."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor], depth: int = 4, block: Any = Block) -> None:
        super().__init__(depth)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.how = how

    def features(self, x: Tensor) -> Tensor:
        return self.how(self.blocks, self.first(x))


def _run(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def each(blocks: Any, x: Tensor, **options: Any) -> Tensor:
    """Every block in a checkpoint of its own."""
    for block in blocks:
        x = again(block, x, **options)
    return x


def every_second(blocks: Any, x: Tensor) -> Tensor:
    for place, block in enumerate(blocks):
        x = again(block, x) if place % 2 else block(x)
    return x


def segments(blocks: Any, x: Tensor) -> Tensor:
    """Two blocks in a checkpoint."""
    for start in range(0, len(blocks), 2):
        x = again(_run, blocks[start : start + 2], x)
    return x


def nested(blocks: Any, x: Tensor) -> Tensor:
    return again(segments, blocks, x)


def sequential(blocks: Any, x: Tensor) -> Tensor:
    return checkpoint_sequential(list(blocks), 2, x, use_reentrant=False)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = operation is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective(blocks: Any, x: Tensor) -> Tensor:
    return each(blocks, x, context_fn=partial(create_selective_checkpoint_contexts, _policy))


pattern("every block", lambda: Recomputed(each))(CLIPPED, "every_block")
pattern("every second block", lambda: Recomputed(every_second))(CLIPPED, "alternating")
pattern("segments of two blocks", lambda: Recomputed(segments))(CLIPPED, "two_blocks")
pattern("`checkpoint_sequential`", lambda: Recomputed(sequential))(CLIPPED, "in_sequence")
pattern(
    "`use_reentrant=True`",
    lambda: Recomputed(partial(checkpoint, _run, use_reentrant=True)),
    refused=always(usage("use_reentrant=False", or_right=True)),
    apart=True,
)(CLIPPED, "reentrant")
pattern("a checkpoint around checkpoints", lambda: Recomputed(nested))(CLIPPED, "around")
pattern("a checkpoint around all blocks", lambda: Recomputed(partial(again, _run)))(CLIPPED, "whole")
pattern("selective: matrix products are kept", lambda: Recomputed(selective))(CLIPPED, "kept_products")


class Dropping(Block):
    """With dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


pattern("dropout, the random state preserved", lambda: Recomputed(each, block=Dropping))(CLIPPED, "dropout")
pattern("without preserving the random state", lambda: Recomputed(partial(each, preserve_rng_state=False)))(
    CLIPPED, "no_random_state"
)


@pattern("without early stop", lambda: Recomputed(each))
def no_early_stop(engine: Engine) -> None:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        CLIPPED(engine)


@pattern("in every second step only", lambda: Recomputed(each))
def every_second_step(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        engine.model.how = each if step % 2 else _run
        engine.update(square(engine.model(engine.data(4, 8))))


@pattern.each_step("in the first step only", lambda: Recomputed(segments))
def first_step(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data(4, 8))))
    engine.model.how = _run


pattern("around the whole model", lambda: Recomputed(_run))(
    updates(lambda engine: square(again(engine.model, engine.data(4, 8))), 0.1), "around_the_root"
)
pattern("around the whole model and its loss", lambda: Recomputed(_run))(
    updates(lambda engine: again(lambda x: square(engine.model(x)), engine.data(4, 8))), "around_the_loss"
)


@pattern.each_step("with a gradient penalty", lambda: Recomputed(each))
def with_penalty(engine: Engine) -> None:
    x = engine.data(4, 8).requires_grad_()
    y = engine.model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    engine.update(square(y) + square(slope))


class Inner(Block):
    """Recomputes a part of itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + again(lambda y: torch.tanh(self.inner(y)), x)


pattern("inside each block", lambda: Recomputed(_run, block=Inner))(CLIPPED, "inside")


class Tied(Mlp):
    """A head inside a checkpoint, whose weight the first layer uses, too."""

    def __init__(self) -> None:
        super().__init__(2, WIDTH, WIDTH)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return again(self.head, each(self.blocks, self.first(x)))


pattern("tied weights in and out of a checkpoint", Tied)(usual(4, WIDTH), "tied")
