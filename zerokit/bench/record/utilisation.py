"""Model FLOPs utilisation: what a device could do at most, and the share of it that a model's arithmetic is.

Peaks are dense (no sparsity) and of the type that products are computed in, in FLOP/s, from NVIDIA's data sheets. A
device or a precision that is not listed has no utilisation: a guess would look like a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zerokit.bench.record.measured import Utilisation

_TERA = 1e12

# By a part of the name that torch gives the device, the more particular first. fp32 is without TF32: torch's default.
PEAKS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "H200": {"bf16": 989.4 * _TERA, "fp16": 989.4 * _TERA, "fp32": 66.9 * _TERA},
        "H100 PCIe": {"bf16": 756.0 * _TERA, "fp16": 756.0 * _TERA, "fp32": 51.2 * _TERA},
        "H100 80GB HBM3": {"bf16": 989.4 * _TERA, "fp16": 989.4 * _TERA, "fp32": 66.9 * _TERA},
        "H100 SXM": {"bf16": 989.4 * _TERA, "fp16": 989.4 * _TERA, "fp32": 66.9 * _TERA},
        "A100": {"bf16": 312.0 * _TERA, "fp16": 312.0 * _TERA, "fp32": 19.5 * _TERA},
        "L40S": {"bf16": 362.0 * _TERA, "fp16": 362.0 * _TERA, "fp32": 91.6 * _TERA},
    }
)


def peak_flops(device: str, precision: str | None) -> float | None:
    """The dense peak of a device by the name that torch gives it, in FLOP/s; None where it is not known.

    It is not known of a slice (MIG), whose name begins with that of the whole device.
    """
    if " MIG " in device:
        return None
    for part, peaks in PEAKS.items():
        if part in device:
            return peaks.get(precision or "")
    return None


def utilisation(
    units_per_second: float, flops_per_unit: float | None, device: str, precision: str | None
) -> Utilisation | None:
    """A device that trains `units_per_second`, each worth `flops_per_unit`; None where a part is unknown."""
    peak = peak_flops(device, precision)
    if peak is None or flops_per_unit is None or precision is None:
        return None
    achieved = units_per_second * flops_per_unit
    return Utilisation(achieved / peak, achieved, peak, device, precision)
