"""DeepSpeed's ZeRO, with torch's fused AdamW and otherwise its own defaults."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.bench.engines.optimizers import shares_of
from zerokit.bench.engines.trainer import Batch, Trainer
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import Loaded

# DeepSpeed's own default, in elements: more than most models have, and it allocates a bucket whole.
_LARGEST_BUCKET = 500_000_000
# It refuses odd ones.
_BUCKET_MULTIPLE = 64


class DeepspeedTrainer(Trainer):
    """DeepSpeed's engine; the last micro-batch is announced to it, and it steps once.

    The model is built in memory on every rank and then partitioned, so that it starts from everyone's weights.
    """

    model: Any  # DeepSpeed's engine

    def make_model(self, loaded: Loaded) -> Any:
        if self.accelerator.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at import
        deepspeed: Any = importlib.import_module("deepspeed")
        model = self.build(loaded)
        (share,) = shares_of(model, self.settings)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=share.build(),
            config=configuration(self.settings, model),
            dist_init_required=False,
        )
        return engine

    def make_optimizers(self) -> Sequence[Optimizer]:
        return [self.model.optimizer]

    @property
    def skipped_steps(self) -> int:
        return int(self.model.skipped_steps)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        self.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def forward(self, batch: Batch) -> Tensor:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.settings.precision or "fp32")
        if dtype is not None:
            batch = tuple(value.to(dtype) if value.is_floating_point() else value for value in batch)
        loss: Tensor = self.model(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss, scale_wrt_gas=False)

    def update(self) -> Tensor | None:
        self.model.step()
        norm = None if self.settings.clip is None else self.model.get_global_grad_norm()
        return norm if norm is None or isinstance(norm, Tensor) else torch.tensor(float(norm))


def configuration(settings: Settings, model: nn.Module) -> dict[str, Any]:
    """DeepSpeed's configuration file, as a dictionary. `bucket_mb`, if given, is counted in fp32."""
    bucket = min(_LARGEST_BUCKET, sum(parameter.numel() for parameter in model.parameters()))
    if settings.bucket_mb is not None:
        bucket = int(settings.bucket_mb * 2**20 / 4)
    bucket = max(1, -(-bucket // _BUCKET_MULTIPLE)) * _BUCKET_MULTIPLE
    return {
        "train_micro_batch_size_per_gpu": settings.batch_size,
        "gradient_accumulation_steps": settings.accumulate,
        "gradient_clipping": settings.clip or 0.0,
        "bf16": {"enabled": settings.precision == "bf16"},
        "fp16": {"enabled": settings.precision == "fp16"},
        "zero_optimization": {
            "stage": settings.stage,
            "overlap_comm": True,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        # An optimizer that is not among those it knows by name, on a device that is no GPU.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
