"""What all ranks' gradients are together: their norm, whether they are finite, and of how many samples or tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zerokit.errors import NonFiniteError, UsageError
from zerokit.runtime.counts import share_of, sum_over_ranks
from zerokit.runtime.loss import Loss
from zerokit.runtime.nonfinite import OnNonfinite, refuse_step, warn_of_waiting
from zerokit.runtime.norms import all_finite, clip_coefficient, global_norm
from zerokit.runtime.precision import LossScale
from zerokit.runtime.step import Agreement, StepControl


class Totals:
    """Turns summed gradients into those of the plain mean loss, once a step, and keeps what loggers ask for."""

    def __init__(self, control: StepControl, on_nonfinite: OnNonfinite, *, scaled: bool) -> None:
        self._gradients, self._collectives, self._control = control.gradients, control.collectives, control
        self._checks, self._raises = scaled or on_nonfinite != "ignore", on_nonfinite == "raise"
        self._waits = self._checks and (scaled or self._raises or not control.leaves_out)
        """Whether the host must know that gradients are finite before it goes on."""
        if self._waits and control.collectives.runs_ahead and not (scaled or self._raises):
            warn_of_waiting(control.inner)
        self.norm: Tensor | None = None  # before the last clipping
        self.count: Tensor | None = None  # of the last step that had one

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
        finite = norm.isfinite()
        if error_if_nonfinite and not finite:
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
            gradients.scale(torch.where(finite, coefficient * factor, 1.0), finite)
        self.norm = norm.float()
        return self.norm

    def settle(self, scaler: LossScale | None) -> tuple[Agreement, LossScale | None]:
        """Agree with all ranks before an update. Returns what they have, and the loss scale of the next step.

        Raises `NonFiniteError` where gradients of some rank are inf or nan and that is to be an error.
        """
        unscaling = self._unscaling(scaler)
        known = self._gradients.finite
        finite = self._finite() if self._checks else None
        agreed = self._control.agree(finite, known=known is not None, waits=self._waits)
        if scaler is not None:
            scaler = scaler if agreed.empty else scaler.after_step(overflow=agreed.overflow)
        elif agreed.overflow and self._raises:
            raise refuse_step()
        if agreed.left_out is None:
            self._control.note(skipped=not agreed.updates, warns=agreed.overflow and scaler is None)
        if agreed.count is not None:
            self.count = agreed.count
        if agreed.updates:
            share = 1.0 if agreed.count is None else share_of(agreed.count, self._collectives.world)
            self._gradients.scale(unscaling * share)
        return agreed, scaler

    def show(self, scaler: LossScale | None) -> None:
        """Make gradients those of the plain mean, to be shown. Collective.

        What is changed then is looked at again; a step that has overflowed in fp16 stays one.
        """
        overflow = scaler is not None and not self._finite()  # before they are scaled, and changed
        count = sum_over_ranks(self._gradients.count, self._collectives)
        factor = self._unscaling(scaler) * share_of(count, self._collectives.world)
        overflown = torch.tensor(False, device=self._collectives.device) if overflow else None
        self._gradients.scale(factor, overflown)

    def _finite(self) -> Tensor:
        """Whether the gradients are finite: those of all ranks where a norm has shown it, else this rank's."""
        known = self._gradients.finite
        return all_finite(self._gradients.shards(), self._collectives.device) if known is None else known

    def _unscaling(self, scaler: LossScale | None) -> float:
        """The factor that makes the gradients those of the plain loss, on a rank that has brought none of them too."""
        loss = self._gradients.loss or Loss(None if scaler is None else scaler.value)
        return 1.0 / loss.factor
