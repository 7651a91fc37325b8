"""DDP with torch's ZeroRedundancyOptimizer."""

from __future__ import annotations

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from zerokit.bench.engines.ddp import DdpTrainer, wrap
from zerokit.bench.engines.trainer import autocast
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import Loaded


def make(loaded: Loaded, settings: Settings, accelerator: Accelerator) -> DdpTrainer:
    """Each rank steps its share of the parameters, whole ones, and broadcasts them."""
    model = wrap(loaded, settings, accelerator)
    optimizer = ZeroRedundancyOptimizer(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,  # as for DDP's gradients: a copy saved, and memory with it
        lr=settings.lr,
        fused=True,
    )
    return DdpTrainer(model, optimizer, clip=settings.clip, autocast=autocast(settings, accelerator))
