"""What a `ZeroOptimizer` says of itself: bytes held and moved, beside their predictions, and numbers for loggers."""

from __future__ import annotations

import dataclasses

from zerokit.formulas import MemoryReport, TrafficReport
from zerokit.layout import Layout
from zerokit.placement import StageArgument
from zerokit.runtime.build import Runtime
from zerokit.runtime.host_copy import HostCopy
from zerokit.runtime.measure import measure_memory, predicted_memory, predicted_traffic
from zerokit.runtime.precision import LossScale
from zerokit.runtime.states import Average, ForwardingOptimizer
from zerokit.runtime.step import StepControl
from zerokit.runtime.totals import Totals


class Reports(ForwardingOptimizer):
    """The part of a `ZeroOptimizer` that only reads."""

    runtime: Runtime
    scaler: LossScale | None
    ema: Average | None
    host_copy: HostCopy | None
    _totals: Totals
    _control: StepControl
    _last_traffic: TrafficReport

    def memory(self) -> MemoryReport:
        """The bytes that this rank holds now, summed over live storages; meaningful between backward and step."""
        held = measure_memory(self.runtime)
        return dataclasses.replace(held, host_copy=0 if self.host_copy is None else self.host_copy.nbytes)

    def predicted_memory(self) -> MemoryReport:
        """The prediction of `memory()` after the first step, from the layout alone; without `host_copy`."""
        return predicted_memory(self.runtime, averaged=self.ema is not None)

    @property
    def last_norm(self) -> float | None:
        """The gradients' norm before the last clipping, for loggers; None before the first. Waits for the device."""
        return None if self._totals.norm is None else self._totals.norm.item()

    @property
    def last_count(self) -> float | None:
        """The samples or tokens of the last step, of all ranks and passes; None before a first one with `count`."""
        return None if self._totals.count is None else self._totals.count.item()

    @property
    def skipped_steps(self) -> int:
        """Steps left out for inf or nan in gradients, or for losses that are sums over nothing. A device tells late."""
        return self._control.skips.total

    @property
    def update_balance(self) -> float:
        """What the busiest rank computes of updates of whole tensors, divided by the mean over ranks, by `update_cost`.

        1.0 is even, and what elementwise optimizers have.
        """
        return self.runtime.owners.balance

    def traffic(self) -> TrafficReport:
        """The traffic of the last finished step."""
        return self._last_traffic

    def predicted_traffic(self, *, micro_batches: int = 1, reductions: int = 1) -> TrafficReport:
        """The predicted traffic of a step, from the layout alone; the first step at stages 1 and 2 moves less."""
        return predicted_traffic(
            self.runtime, averaged=self.ema is not None, micro_batches=micro_batches, reductions=reductions
        )

    @property
    def stage(self) -> StageArgument:
        """The stage; on a mesh of two axes, (outer, inner). Where units differ, that of each module with parameters."""
        return self.runtime.placement.argument(self.layout)

    @property
    def layout(self) -> Layout:
        """The layout: how the model's elements are sharded across ranks."""
        return self.runtime.layout

    @property
    def loss_scale(self) -> float:
        """The factor that `backward` applies to the loss: 1 unless fp16."""
        return 1.0 if self.scaler is None else self.scaler.value
