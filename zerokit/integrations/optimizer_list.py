"""`OptimizerList`: several torch optimizers as one, for libraries that train with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerokit.runtime.inner import Several, parts_of


class OptimizerList(Several):
    """Torch optimizers over parts of one model, which a library takes as one optimizer.

        optimizer = OptimizerList([torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-4)])

    `param_groups` are theirs, one behind the other, so a scheduler drives them all. zerokit's integrations make one
    `ZeroOptimizer` of it; a library's own trainer, and so DDP, steps each of them.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every optimizer; returns what `closure` returned, which is called once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in parts_of(self):
            part.step()
        return loss
