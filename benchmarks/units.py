"""A model taken over by the runtime without communication, for benchmarks of what is done with its units."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from zerokit.runtime.build import Parts, build
from zerokit.runtime.precision import Precision
from zerokit.stages import Stage


def take_over(model: nn.Module, group: dist.ProcessGroup) -> Parts:
    """The parts of a `ZeroOptimizer` at stage 1: AdamW over this rank's shards, in fp32."""
    return build(
        model,
        AdamW,
        {"lr": 1e-3},
        stage=Stage.OPTIMIZER,
        precision=Precision.of("fp32"),
        params=None,
        rule=None,
        bucket_mb=16.0,
        prefetch=1,
        process_group=group,
        timeout=None,
        init=None,
    )
