"""torch's DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from zerokit.bench.engines.trainer import TorchTrainer, adamw, autocast, build_in_memory
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import Loaded


# DDP compares annotations with classes; here they would be strings.
def compress_in_bf16(state, bucket):  # type: ignore[no-untyped-def]
    """torch's hook, under a name of its own: by that of the hook DDP refuses it wherever torch has no CUDA."""
    return bf16_compress_hook(state, bucket)


class DdpTrainer(TorchTrainer):
    """Gradients are reduced in the backward pass of the last micro-batch."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if last else model.no_sync()


def wrap(loaded: Loaded, settings: Settings, accelerator: Accelerator) -> DistributedDataParallel:
    """The model under DDP. `bucket_mb`, where it is given, is its `bucket_cap_mb`; the bf16 wire is torch's hook."""
    options: dict[str, Any] = {} if settings.bucket_mb is None else {"bucket_cap_mb": settings.bucket_mb}
    # Gradients as views of the buckets save a copy and the second set of gradients.
    engine = DistributedDataParallel(
        build_in_memory(loaded, accelerator), gradient_as_bucket_view=True, **options
    )
    if settings.wire == "bf16":
        engine.register_comm_hook(None, compress_in_bf16)
    return engine


def make(loaded: Loaded, settings: Settings, accelerator: Accelerator) -> DdpTrainer:
    """Built in memory on every rank, as DDP wants it."""
    model = wrap(loaded, settings, accelerator)
    optimizer = adamw(model.parameters(), settings)
    return DdpTrainer(model, optimizer, clip=settings.clip, autocast=autocast(settings, accelerator))
