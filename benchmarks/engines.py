"""The engines that are compared, each as its users would write it, tuned where tuning helps it.

An engine is a function of a `Job`: it wraps the model and returns the training step, a function of tokens and
targets that returns the detached loss of this rank. Everyone trains with fused AdamW.

Each engine imports what it needs inside: nobody's memory includes another's modules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.cells import CellSpec
from zerokit.bench.workloads.initialise import init_module

Step = Callable[[Tensor, Tensor], Tensor]
Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Job:
    """What an engine gets: `build()` makes the model on the device that `torch.device` names as a context."""

    spec: CellSpec
    device: torch.device
    build: Callable[[], nn.Module]

    def model(self) -> nn.Module:
        """The model in memory, built on the device."""
        with self.device:
            return self.build()

    def adamw(self, model: nn.Module) -> Optimizer:
        """Torch's own fused AdamW over whole parameters."""
        return AdamW(model.parameters(), lr=self.spec.learning_rate, fused=True)

    def autocast(self) -> AbstractContextManager[object]:
        """Mixed precision where it is autocast's business: fp32 parameters, bf16 matrix products."""
        if self.spec.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def _loop(model: nn.Module, optimizer: Optimizer, context: Context = nullcontext) -> Step:
    """The training loop that all engines share; `context` surrounds the forward pass."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with context():
            loss: Tensor = model(tokens, targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compute_only(job: Job) -> Step:
    """Every rank trains alone: the floor, since nothing is communicated. Its losses are its own."""
    model = job.model()
    return _loop(model, job.adamw(model), job.autocast)


def _ddp(job: Job) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    # Gradients as views of the buckets save a copy and the second set of gradients.
    return DistributedDataParallel(job.model(), gradient_as_bucket_view=True)


def ddp(job: Job) -> Step:
    """DistributedDataParallel."""
    model = _ddp(job)
    return _loop(model, job.adamw(model), job.autocast)


def zero_redundancy_optimizer(job: Job) -> Step:
    """DDP with torch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _ddp(job)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=AdamW,
        parameters_as_bucket_view=True,  # as DDP: a copy saved, and memory with it
        lr=job.spec.learning_rate,
        fused=True,
    )
    return _loop(model, optimizer, job.autocast)


def fsdp2(job: Job) -> Step:
    """FSDP2 on every block and on the root, parameters freed after forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(job.device.type, (job.spec.world,))
    policy = MixedPrecisionPolicy()
    if job.spec.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = job.model()
    blocks = model.get_submodule("blocks")
    for module in [*blocks.children(), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return _loop(model, job.adamw(model))


def zerokit(stage: int, *, meta: bool = False) -> Callable[[Job], Step]:
    """zerokit at `stage`; with `meta` the model is built on meta and initialised unit by unit."""

    def engine(job: Job) -> Step:
        from zerokit import ZeroOptimizer

        if meta:
            with torch.device("meta"):
                model = job.build()
        else:
            model = job.model()
        buckets: dict[str, Any] = {} if job.spec.bucket_mb is None else {"bucket_mb": job.spec.bucket_mb}
        optimizer = ZeroOptimizer(
            model,
            AdamW,
            stage=stage,
            precision=job.spec.precision,
            init_fn=init_module if meta else None,
            lr=job.spec.learning_rate,
            **buckets,
        )
        return _loop(model, optimizer)

    return engine


ENGINES: dict[str, Callable[[Job], Step]] = {
    "compute-only": compute_only,
    "ddp": ddp,
    "zero-redundancy-optimizer": zero_redundancy_optimizer,
    "fsdp2": fsdp2,
    **{f"zerokit-{stage}": zerokit(stage) for stage in range(4)},
    "zerokit-3-meta": zerokit(3, meta=True),
}
