"""What all ranks' gradients are together: their norm, whether they are finite, and of how many samples or tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zerokit.errors import NonFiniteError, UsageError
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.counts import share_of, sum_over_ranks
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.precision import LossScale
from zerokit.runtime.step import StepControl, all_finite, clip_coefficient, global_norm


class Totals:
    """Turns summed gradients into those of the plain mean loss, once a step, and keeps what loggers ask for."""

    def __init__(self, gradients: Gradients, collectives: Collectives, control: StepControl) -> None:
        self._gradients, self._collectives, self._control = gradients, collectives, control
        self.norm: Tensor | None = None  # before the last clipping
        self.count: Tensor | None = None  # of the last step that had one
        self._finite: Tensor | None = None
        """Whether the gradients are finite, 0-d, where a norm has shown it."""

    def forget(self) -> None:
        """Other gradients come."""
        self._finite = None

    def clip(
        self, max_norm: float, norm_type: float, scaler: LossScale | None, *, error_if_nonfinite: bool
    ) -> Tensor:
        """Scale gradients down to a norm of at most `max_norm`; returns their norm before that, 0-d fp32."""
        if not norm_type > 0 or math.isnan(max_norm):
            raise UsageError(
                f"max_norm={max_norm}, norm_type={norm_type}: expected numbers, of a positive type or inf"
            )
        gradients, own = self._gradients, self._gradients.count
        norm, count = global_norm(
            gradients.shards(), float(norm_type), self._collectives, 0.0 if own is None else own
        )
        self._finite = norm.isfinite()
        if error_if_nonfinite and not self._finite:
            raise NonFiniteError(
                f"the gradients' norm of type {norm_type:g} is {norm.item():g}, so they cannot be clipped: look at the "
                "loss and the data, or call clip_grad_norm_() without error_if_nonfinite"
            )
        factor = self._unscaling(scaler) * share_of(count, self._collectives.world)
        norm = norm * factor
        coefficient = clip_coefficient(norm, max_norm)
        counted = own is not None if self._collectives.runs_ahead else bool(count)
        if counted:
            self.count = count
        if counted or own is None:  # else they are sums over nothing, as `settle` finds
            gradients.scale(torch.where(self._finite, coefficient * factor, 1.0))
        self.norm = norm.float()
        return self.norm

    def settle(self, scaler: LossScale | None) -> tuple[bool, LossScale | None]:
        """Agree with all ranks before an update. Returns whether there is one, and the loss scale of the next step.

        There is none where fp16 gradients have overflowed on some rank, or losses are sums over nothing.
        """
        unscaling = self._unscaling(scaler)
        if scaler is not None and self._finite is None:
            self._finite = all_finite(self._gradients.shards(), self._collectives.device)
        agreed = self._control.agree(None if scaler is None else self._finite)
        if scaler is not None and not agreed.empty:
            scaler = scaler.after_step(overflow=agreed.overflow)
        if agreed.count is not None:
            self.count = agreed.count
        updates = not (agreed.overflow or agreed.empty)
        if updates:
            share = 1.0 if agreed.count is None else share_of(agreed.count, self._collectives.world)
            self._gradients.scale(unscaling * share)
        return updates, scaler

    def show(self, scaler: LossScale | None) -> None:
        """Make gradients those of the plain mean, to be shown. Collective."""
        if scaler is not None and self._finite is None:
            self._finite = all_finite(self._gradients.shards(), self._collectives.device)
        count = sum_over_ranks(self._gradients.count, self._collectives)
        self._gradients.scale(self._unscaling(scaler) * share_of(count, self._collectives.world))

    def _unscaling(self, scaler: LossScale | None) -> float:
        """The factor that makes the gradients those of the plain loss, on a rank that has brought none of them too."""
        return 1.0 / (self._gradients.loss_scale or (1.0 if scaler is None else scaler.value))
