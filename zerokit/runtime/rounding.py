"""One unit's gradients on an int8 or int4 wire: how they are rounded, and what rounding has taken away.

With feedback, rounding is to nearest. Without, it is random, by keys from (epoch, turn, unit,
rank): the saved step names an epoch, so a run that goes on and one that resumes round alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerokit.layout import Interval
from zerokit.runtime.collectives.quantised import QuantisedWire, rounding_key
from zerokit.runtime.masters import MasterSlice
from zerokit.runtime.precision import Precision
from zerokit.runtime.unit import UnitState

RESIDUAL = "wire_residual"
"""The name of the residuals' sum among the states of a master, and of its stream in a checkpoint."""


class Rounding:
    """The rounding of one unit on this rank."""

    def __init__(self, state: UnitState, precision: Precision) -> None:
        assert precision.blocks is not None
        self._state, self._form = state, precision.blocks
        self._unit, self._collectives = state.unit, state.collectives
        self._axis = self._collectives.mesh.axes[0]
        self.sent = state.placement.sent_outward(self._unit, self._collectives.position)
        self.residual: Tensor | None = None
        """What this rank's terms have lost, of the elements `sent` over the outermost axis."""
        self._feedback = precision.feedback
        if self._feedback and self._collectives.world > 1:
            self.residual = torch.zeros(self.sent.numel, dtype=torch.float32, device=state.device)
        self._epoch: object = None
        self._turn = 0

    def gradient_wire(self, bucket: Tensor) -> QuantisedWire:
        """The wire of the next reduction, which is one of `bucket`."""
        if self._feedback:
            wire = QuantisedWire(self._form, self.residual)
        else:
            self._turn += 1
            parts = 0, self._epoch, self._turn, self._unit.index, self._collectives.rank
            wire = QuantisedWire(self._form, key=rounding_key(*parts))
        if self._collectives.world == 1 and self.residual is not None:
            # From a checkpoint of several ranks. One rank alone rounds nothing.
            bucket.add_(self.residual)
            self.residual = None
        return wire

    def settle(self, epoch: object) -> None:
        """Let the owner of each element hold the sum of residuals. All ranks call it; `epoch` names what follows."""
        self._epoch, self._turn = epoch, 0
        if self.residual is None or self._collectives.world == 1:
            return
        own = self._own(self._state.own)
        self._collectives.reduce_scatter(self._unit, self.residual, own, add=False, axes=(self._axis,)).wait()
        sums = own * self._collectives.mesh.size(self._axis) if self._collectives.averages else own.clone()
        self.residual.zero_()
        own.copy_(sums)

    def shown(self, master: MasterSlice) -> Tensor:
        """The owners' residuals, in the shape of `master`; zero elsewhere."""
        whole = torch.zeros_like(master.tensor, dtype=torch.float32)
        master.part(whole, self._state.own).copy_(self._own(master.interval))
        return whole

    def take(self, residuals: list[tuple[MasterSlice, Tensor]], epoch: object) -> None:
        """Go on from what `shown` gave, of this unit's masters; nothing is left of what was here."""
        self._epoch, self._turn = epoch, 0
        if not self._feedback:
            return
        if self.residual is None and residuals:
            self.residual = torch.zeros(self.sent.numel, dtype=torch.float32, device=self._state.device)
        if self.residual is not None:
            self.residual.zero_()
        for master, values in residuals:
            self._own(master.interval).copy_(master.part(values, self._state.own))

    def _own(self, within: Interval) -> Tensor:
        """The residuals of the elements that this rank owns and that lie `within`."""
        assert self.residual is not None
        both = self._state.own.intersection(within)
        return self.residual[both.start - self.sent.start : both.stop - self.sent.start]

    def state(self) -> Any:
        """This rank's part, for `load_state`."""
        return self._epoch, self._turn, None if self.residual is None else self.residual.clone()

    def load_state(self, state: Any) -> None:
        self._epoch, self._turn, residual = state
        self.residual = None if residual is None else residual.clone()
