"""DeepSpeed's ZeRO, with torch's fused AdamW and otherwise its own defaults."""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.bench.engines.trainer import Batch, Trainer, adamw, build_in_memory
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import Loaded

# DeepSpeed's own default, in elements: more than most models have, and it allocates a bucket whole.
_LARGEST_BUCKET = 500_000_000
# It refuses odd ones.
_BUCKET_MULTIPLE = 64


class DeepSpeedTrainer(Trainer):
    """DeepSpeed counts micro-batches itself; here it is told which is the last, and steps once."""

    def __init__(self, engine: Any, dtype: torch.dtype | None, clip: float | None) -> None:
        self._engine = engine
        self._dtype = dtype
        self._clip = clip

    @property
    def skipped_steps(self) -> int:
        return int(self._engine.skipped_steps)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def forward(self, batch: Batch) -> Tensor:
        if self._dtype is not None:
            batch = tuple(value.to(self._dtype) if value.is_floating_point() else value for value in batch)
        loss: Tensor = self._engine(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def update(self) -> Tensor | None:
        self._engine.step()
        if self._clip is None:
            return None
        norm = self._engine.get_global_grad_norm()
        if norm is None or isinstance(norm, Tensor):
            return norm
        return torch.tensor(float(norm))


def make(loaded: Loaded, settings: Settings, accelerator: Accelerator) -> DeepSpeedTrainer:
    """Built in memory on every rank and then partitioned by DeepSpeed, so that it starts from everyone's weights."""
    if accelerator.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at import
    deepspeed: Any = importlib.import_module("deepspeed")
    model = build_in_memory(loaded, accelerator)
    optimizer = adamw(model.parameters(), settings)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=configuration(settings, model), dist_init_required=False
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision or "fp32")
    return DeepSpeedTrainer(engine, dtype, settings.clip)


def configuration(settings: Settings, model: nn.Module) -> dict[str, Any]:
    """DeepSpeed's configuration file, as a dictionary. `bucket_mb`, where it is given, is counted in fp32."""
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
