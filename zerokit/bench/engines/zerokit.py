"""zerokit's own engine: `ZeroOptimizer` at any stage."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from zerokit.bench.engines.optimizers import shares_of
from zerokit.bench.engines.trainer import Batch, Trainer
from zerokit.bench.record.by_rank import parse_shares
from zerokit.bench.workloads.build import Loaded
from zerokit.placement import StageArgument, stage_of
from zerokit.runtime import Precision
from zerokit.sizes import BLOCK_FORMATS
from zerokit.training import LocalSteps, ZeroOptimizer
from zerokit.training.computing import ComputeClock, HostClock, compute_clock


class ZerokitTrainer(Trainer):
    """`ZeroOptimizer` in the loop of the README."""

    zero: ZeroOptimizer
    local: LocalSteps | None = None
    autocasts = False

    def make_model(self, loaded: Loaded) -> nn.Module:
        """The model on the meta device; a stage that shards parameters never holds it whole.

        Where gloo serves CUDA tensors, the model is built on the device: from one on meta the runtime concludes CPU.
        """
        self._count = loaded.count if self.settings.pace else None
        on_meta = self.accelerator.backend == "nccl" or self.accelerator.device.type == "cpu"
        self._init_fn = loaded.init_fn if on_meta else None
        return self.build(loaded, on_meta=self._init_fn is not None)

    def make_optimizers(self) -> Sequence[ZeroOptimizer]:
        settings = self.settings
        precision = Precision.of(settings.precision or "fp32")
        wire: Any = None if settings.wire == "own" else settings.wire  # one of the names that Precision knows
        between_islands = settings.every is not None and wire in BLOCK_FORMATS
        if wire is not None and not between_islands:
            precision = replace(precision, wire=wire)
        options: dict[str, Any] = {} if settings.bucket_mb is None else {"bucket_mb": settings.bucket_mb}
        outer, inner = map(stage_of, settings.stages)
        stage: StageArgument = inner if settings.mesh is None else (outer, inner)
        if settings.every is not None:
            stage = "local", inner
        if settings.shares is not None:
            options["shares"] = parse_shares(settings.shares) or settings.shares
        self.zero = ZeroOptimizer(
            self.model,
            self._classes(),
            stage=stage,
            mesh=settings.shape if settings.every is None else settings.islands,
            precision=precision,
            init_fn=self._init_fn,
            states=settings.states,
            **options,
        )
        if settings.every is not None:
            self.local = LocalSteps(
                self.zero,
                every=settings.every,
                fragments=settings.fragments,
                delay=settings.delay,
                wire=wire if between_islands else None,
            )
        return [self.zero]

    def _classes(self) -> Any:
        """The class of all parameters, or each class with its own; `ZeroOptimizer` chooses kernels by itself."""
        classes = {}
        for share in shares_of(self.model, self.settings):
            options = {name: value for name, value in share.options.items() if name != "fused"}
            classes[partial(share.optimizer_class, **options)] = share.parameters
        return next(iter(classes)) if self.settings.optimizer == "adamw" else classes

    @property
    def skipped_steps(self) -> int:
        return self.zero.skipped_steps

    @property
    def waited_s(self) -> float:
        between = 0.0 if self.local is None else self.local.waited_s
        return self.zero.runtime.collectives.reporter.waited_s + between

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.zero.accumulate()

    def compute_clock(self) -> ComputeClock | None:
        if self.local is None:
            return compute_clock(self.zero.runtime.collectives)
        return None if self.accelerator.is_cuda else HostClock(self)

    def backward(self, loss: Tensor) -> None:
        self.zero.backward(loss)

    def backward_of(self, loss: Tensor, batch: Batch, passes: int) -> None:
        """By pace micro-batches differ in size, and the update takes the mean over all of them."""
        if self._count is None:
            super().backward_of(loss, batch, passes)
        else:
            count = self._count(batch)
            self.zero.backward(loss * count, count=count)

    def clip_to(self, largest: float) -> Tensor:
        return self.zero.clip_grad_norm_(largest)
