"""Model FLOPs utilisation: a device's peak, and the share of it that a model's arithmetic reaches.

Peaks are dense (no sparsity) and of the type that products are computed in, in FLOP/s: those that a plan uses. A device
or a precision that is not listed has no utilisation: a guess would look like a measurement.
"""

from __future__ import annotations

from zerokit.bench.record.measured import Utilisation
from zerokit.planning.hardware import known_device


def peak_flops(device: str, precision: str | None) -> float | None:
    """The dense peak of a device by its name in torch, in FLOP/s; None if unknown.

    It is not known of a slice (MIG), whose name begins with that of the whole device.
    """
    known = known_device(device)
    return None if known is None else known.flops.get(precision or "")


def utilisation(
    units_per_second: float, flops_per_unit: float | None, device: str, precision: str | None
) -> Utilisation | None:
    """The utilisation of a device that trains `units_per_second` at `flops_per_unit`; None if a part is unknown."""
    peak = peak_flops(device, precision)
    if peak is None or flops_per_unit is None or precision is None:
        return None
    achieved = units_per_second * flops_per_unit
    return Utilisation(achieved / peak, achieved, peak, device, precision)
