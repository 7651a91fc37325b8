"""Activation checkpointing of a model's blocks: backward runs their forward again instead of keeping activations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from zerokit.errors import UsageError


def blocks_of(model: nn.Module, *, listed: bool = False) -> Iterator[nn.Module]:
    """The blocks that are recomputed as a whole: the children of every outermost `ModuleList`.

    A list in a list is no block, as nobody calls it. `listed` says that `model` is such a list itself.
    """
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from blocks_of(child, listed=True)
        elif listed:
            yield child
        else:
            yield from blocks_of(child)


def recompute_blocks(model: nn.Module) -> None:
    """Recompute every block of `model` in backward; changes the model in place.

    Raises `UsageError` for a model without blocks.
    """
    blocks = list(blocks_of(model))
    if not blocks:
        raise UsageError(
            "the model has no nn.ModuleList, whose children are what is recomputed: omit --recompute"
        )
    for block in blocks:  # hooks of a block stay outside, as ZeroOptimizer's must
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
