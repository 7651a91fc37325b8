"""DDP with torch's ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from zerokit.bench.engines.ddp import DdpTrainer
from zerokit.bench.engines.trainer import Held, held_by, trainable


class ZeroRedundancyOptimizerTrainer(DdpTrainer):
    """DDP with ZeroRedundancyOptimizer; each rank steps some whole parameters and broadcasts them."""

    optimizer: ZeroRedundancyOptimizer

    def make_optimizer(self) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(
            trainable(self.model.parameters()),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,  # as for DDP's gradients: a copy saved, and memory with it
            lr=self.settings.lr,
            fused=True,
        )

    def held(self) -> Iterator[Held]:
        yield from super().held()
        yield from held_by(self.optimizer.optim)
