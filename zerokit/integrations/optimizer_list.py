"""`OptimizerList`: several torch optimizers as one, for libraries that train with one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from zerokit.errors import UsageError
from zerokit.runtime.inner import Several, parts_of


class OptimizerList(Several):
    """Torch optimizers over parts of one model, which a library takes as one optimizer.

        optimizer = OptimizerList([torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-4)])

    `param_groups` are theirs, one behind the other, so a scheduler drives them all. zerokit's integrations make one
    `ZeroOptimizer` of it; a library's own trainer, and so DDP, steps each of them.

    Raises `UsageError` for anything else than optimizers.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        given: list[object] = list(optimizers)
        if strange := [one for one in given if not isinstance(one, Optimizer)]:
            raise UsageError(
                f"OptimizerList was given {strange[0]!r}: expected optimizers, each built over its parameters, as in "
                "OptimizerList([torch.optim.Muon(matrices), torch.optim.AdamW(rest)])"
            )
        super().__init__([part for one in given if isinstance(one, Optimizer) for part in parts_of(one)])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every optimizer; returns what `closure` returned, which is called once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in parts_of(self):
            part.step()
        return loss
