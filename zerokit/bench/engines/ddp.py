"""torch's DistributedDataParallel, and the two engines of torch's over it: PostLocalSGD and ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from zerokit.bench.engines.optimizers import shares_of
from zerokit.bench.engines.trainer import Trainer
from zerokit.bench.workloads.build import Loaded

if TYPE_CHECKING:
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

_POWERSGD_RANK = 4
"""The rank of the low-rank matrices: the largest of the paper's choices for language models (arXiv:1905.13727, §5)."""


# DDP compares annotations with classes; here they would be strings.
def compress_in_bf16(state, bucket):  # type: ignore[no-untyped-def]
    """torch's hook under another name, because DDP refuses the original name if torch has no CUDA."""
    return bf16_compress_hook(state, bucket)


class DdpTrainer(Trainer):
    """DistributedDataParallel; gradients are reduced in the backward pass of the last micro-batch."""

    model: DistributedDataParallel

    def make_model(self, loaded: Loaded) -> DistributedDataParallel:
        """`bucket_mb`, if given, is DDP's `bucket_cap_mb`; bf16 and PowerSGD are torch's hooks."""
        options: dict[str, Any] = {}
        if self.settings.bucket_mb is not None:
            options["bucket_cap_mb"] = self.settings.bucket_mb
        # Gradients as views of the buckets save a copy and the second set of gradients.
        engine = DistributedDataParallel(self.build(loaded), gradient_as_bucket_view=True, **options)
        if self.settings.wire == "bf16":
            engine.register_comm_hook(None, compress_in_bf16)
        if self.settings.wire == "powersgd":
            engine.register_comm_hook(
                PowerSGDState(None, _POWERSGD_RANK, start_powerSGD_iter=2), powerSGD_hook
            )
        return engine

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.model.no_sync()


class PostLocalSgdTrainer(DdpTrainer):
    """PostLocalSGD; gradients stay on each rank from the first step."""

    def make_model(self, loaded: Loaded):  # type: ignore[no-untyped-def]  # as DDP's
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local

        engine = super().make_model(loaded)
        state = local.PostLocalSGDState(
            process_group=None, subgroup=None, start_localSGD_iter=0, post_local_gradient_allreduce=False
        )
        engine.register_comm_hook(state, local.post_localSGD_hook)
        return engine

    def make_optimizers(self) -> Sequence[PostLocalSGDOptimizer]:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        assert self.settings.every is not None
        averagers = partial(PeriodicModelAverager, period=self.settings.every, warmup_steps=0)
        return [
            PostLocalSGDOptimizer(share.build(), averagers())
            for share in shares_of(self.model, self.settings)
        ]


class ZeroRedundancyOptimizerTrainer(DdpTrainer):
    """DDP with ZeroRedundancyOptimizer; each rank steps some whole parameters and broadcasts them."""

    def make_optimizers(self) -> Sequence[ZeroRedundancyOptimizer]:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return [
            ZeroRedundancyOptimizer(
                share.parameters,
                optimizer_class=share.optimizer_class,
                parameters_as_bucket_view=True,  # as for DDP's gradients: a copy saved, and memory with it
                **share.options,
            )
            for share in shares_of(self.model, self.settings)
        ]
