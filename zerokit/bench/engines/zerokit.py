"""This package's `ZeroOptimizer`, at any stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.bench.engines.trainer import BUFFERS, GRADIENTS, OPTIMIZER, PARAMETERS, Held, Trainer
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import Loaded
from zerokit.placement import StageArgument, stage_of
from zerokit.runtime import Precision, ZeroOptimizer
from zerokit.runtime.measure import list_holdings

_KINDS = {
    "parameters": PARAMETERS,
    "frozen": PARAMETERS,
    "gathered": PARAMETERS,
    "gradients": GRADIENTS,
    "optimizer": OPTIMIZER,
    "scalars": OPTIMIZER,
    "buffers": BUFFERS,
    "buckets": BUFFERS,
}


def _stage_of(settings: Settings) -> StageArgument:
    if settings.mesh is None:
        return stage_of(settings.stage)
    outer, inner = settings.stages
    return stage_of(outer), stage_of(inner)


class ZerokitTrainer(Trainer):
    """The loop of the README."""

    zero: ZeroOptimizer
    autocasts = False

    def make_model(self, loaded: Loaded) -> nn.Module:
        """Built on meta, and so never whole in memory where the stage shards it.

        Where gloo serves CUDA tensors, the model is built on the device: from one on meta the runtime concludes CPU.
        """
        on_meta = self.accelerator.backend == "nccl" or self.accelerator.device.type == "cpu"
        self._init_fn = loaded.init_fn if on_meta else None
        return self.build(loaded, on_meta=self._init_fn is not None)

    def make_optimizer(self) -> ZeroOptimizer:
        settings = self.settings
        precision = Precision.of(settings.precision or "fp32")
        if settings.wire == "bf16":
            precision = replace(precision, wire=torch.bfloat16)
        options: dict[str, Any] = {} if settings.bucket_mb is None else {"bucket_mb": settings.bucket_mb}
        self.zero = ZeroOptimizer(
            self.model,
            torch.optim.AdamW,
            stage=_stage_of(settings),
            mesh=settings.shape,
            precision=precision,
            init_fn=self._init_fn,
            lr=settings.lr,
            **options,
        )
        return self.zero

    @property
    def skipped_steps(self) -> int:
        return self.zero.skipped_steps

    @property
    def waited_s(self) -> float:
        return self.zero.parts.collectives.reporter.waited_s

    def held(self) -> Iterator[Held]:
        parts = self.zero.parts
        for one in list_holdings(parts.model, parts.storages, parts.gradients, parts.inner):
            yield _KINDS[one.line], one.tensor, one.used + one.padding

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.zero.accumulate()

    def backward(self, loss: Tensor) -> None:
        self.zero.backward(loss)

    def clip_to(self, largest: float) -> Tensor:
        return self.zero.clip_grad_norm_(largest)
