"""torch's PostLocalSGDOptimizer over DDP: ranks train alone and average their weights periodically."""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from zerokit.bench.engines.ddp import DdpTrainer
from zerokit.bench.engines.trainer import adamw
from zerokit.bench.workloads.build import Loaded


class PostLocalSgdTrainer(DdpTrainer):
    """PostLocalSGD; gradients stay on each rank from the first step."""

    def make_model(self, loaded: Loaded):  # type: ignore[no-untyped-def]  # as DDP's
        engine = super().make_model(loaded)
        state = PostLocalSGDState(
            process_group=None, subgroup=None, start_localSGD_iter=0, post_local_gradient_allreduce=False
        )
        engine.register_comm_hook(state, post_localSGD_hook)
        return engine

    def make_optimizer(self) -> PostLocalSGDOptimizer:
        assert self.settings.every is not None
        averager = PeriodicModelAverager(period=self.settings.every, warmup_steps=0)
        return PostLocalSGDOptimizer(adamw(self.model.parameters(), self.settings), averager)
