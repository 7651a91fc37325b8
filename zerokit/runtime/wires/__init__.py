"""Narrow wires for gradients: the forms in which terms of a sum cross between ranks.

rounding   rounding at random, by keys that depend on step, unit and rank
blocks     int8 and int4: blocks of small integers with one scale each
"""

from __future__ import annotations

from functools import partial

import torch

from zerokit.runtime.collectives import Wire
from zerokit.runtime.precision import Precision
from zerokit.runtime.wires.blocks import QuantisedWire
from zerokit.runtime.wires.rounding import Draws

__all__ = ["Draws", "QuantisedWire", "make_wire"]


def make_wire(precision: Precision, draws: Draws, unit: int) -> Wire | None:
    """The wire of a unit's gradients; None where they travel in the dtype in which they are summed."""
    if precision.blocks is not None:
        return QuantisedWire(precision.blocks, partial(draws.key, unit))
    return Wire(precision.wire) if isinstance(precision.wire, torch.dtype) else None
