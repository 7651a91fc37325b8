"""torch's DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from zerokit.bench.engines.trainer import Trainer
from zerokit.bench.workloads.build import Loaded

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
