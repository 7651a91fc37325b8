"""This package's `ZeroOptimizer`, at any stage."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.bench.engines.trainer import Batch, Trainer, build_in_memory
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import Loaded
from zerokit.runtime import Precision, ZeroOptimizer


class ZerokitTrainer(Trainer):
    """The loop of the README."""

    zero: ZeroOptimizer

    def __init__(self, model: nn.Module, zero: ZeroOptimizer, clip: float | None) -> None:
        self.model = model
        self.zero = zero
        self._clip = clip

    @property
    def skipped_steps(self) -> int:
        return self.zero.skipped_steps

    @property
    def waited_s(self) -> float:
        return self.zero.parts.collectives.watch.waited_s

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.zero.accumulate()

    def forward(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        self.zero.backward(loss)

    def update(self) -> Tensor | None:
        norm = None if self._clip is None else self.zero.clip_grad_norm_(self._clip)
        self.zero.step()
        self.zero.zero_grad()
        return norm


def make(loaded: Loaded, settings: Settings, accelerator: Accelerator) -> ZerokitTrainer:
    """Built on meta, and so never whole in memory where the stage shards it.

    Where gloo serves CUDA tensors, the model is built on the device: from one on meta the runtime concludes CPU.
    """
    on_meta = loaded.init_fn is not None and (
        accelerator.backend == "nccl" or accelerator.device.type == "cpu"
    )
    if on_meta:
        with torch.device("meta"):
            model = loaded.build()
    else:
        model = build_in_memory(loaded, accelerator)
    options: dict[str, Any] = {} if settings.bucket_mb is None else {"bucket_mb": settings.bucket_mb}
    zero = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=settings.stage,
        precision=_precision(settings),
        init_fn=loaded.init_fn if on_meta else None,
        lr=settings.lr,
        **options,
    )
    return ZerokitTrainer(model, zero, settings.clip)


def _precision(settings: Settings) -> Precision:
    precision = Precision.of(settings.precision or "fp32")
    return replace(precision, wire=torch.bfloat16) if settings.wire == "bf16" else precision
