"""Activation checkpointing of a model's blocks: backward runs their forward again instead of keeping activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from zerokit.errors import UsageError


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks that are recomputed as a whole: the children of every outermost `ModuleList`."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from _blocks_in(child)
        else:
            yield from blocks_of(child)


def _blocks_in(blocks: nn.ModuleList) -> Iterator[nn.Module]:
    """The blocks of a list; a list in it is no block, as nobody calls it."""
    for block in blocks:
        if isinstance(block, nn.ModuleList):
            yield from _blocks_in(block)
        else:
            yield block


def recompute_blocks(model: nn.Module) -> None:
    """Recompute every block of `model` in backward; changes the model in place.

    Raises `UsageError` for a model without blocks.
    """
    blocks = list(blocks_of(model))
    if not blocks:
        raise UsageError(
            "the model has no nn.ModuleList, whose children are what is recomputed: omit --recompute"
        )
    for block in blocks:
        _recompute(block)


def _recompute(block: nn.Module) -> None:
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    block.forward = forward  # hooks of the block stay outside, as ZeroOptimizer's must
