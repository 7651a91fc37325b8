"""Floating-point formats of eight bits and fewer: their values, and how many of them an element holds.

Numbers of six or four bits are *packed*: an element is the bytes that a few of them fill, as torch has it for
`float4_e2m1fn_x2`, and stands for that many along the last dimension of a file's shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

PACKED = {"float4_e2m1fn_x2": 2, "float6_e2m3fn_x4": 4, "float6_e3m2fn_x4": 4}
"""Numbers an element, by dtype."""

WITHOUT_TORCH = frozenset(dtype for dtype in PACKED if dtype.startswith("float6"))
"""The formats that torch does not have."""

_EXPONENTS = {
    "float8_e4m3fn": (4, 7),
    "float8_e5m2": (5, 15),
    "float8_e4m3fnuz": (4, 8),
    "float8_e5m2fnuz": (5, 16),
    "float8_e8m0fnu": (8, 127),
}
"""Bits of the exponent, and its bias (arXiv:2209.05433, arXiv:2206.02915 for "fnuz", OCP MX v1.0 for the last)."""

SMALL = frozenset(_EXPONENTS)
"""The formats of eight bits that numpy does not have."""


def values_of(dtype: str) -> NDArray[Any]:
    """The value of each of the 256 codes of a format of `SMALL`, exactly, as float32."""
    import numpy as np

    bits, bias = _EXPONENTS[dtype]
    code = np.arange(256)
    if dtype == "float8_e8m0fnu":  # a scale: no sign, no mantissa, no zero
        scales: NDArray[Any] = np.where(code == 255, np.nan, np.ldexp(1.0, code - bias)).astype(np.float32)
        return scales
    width = 7 - bits
    exponent, mantissa = (code & 127) >> width, code & ((1 << width) - 1)
    scaled = np.where(exponent > 0, (1 << width) + mantissa, mantissa)
    size = np.ldexp(scaled.astype(np.float64), np.maximum(exponent, 1) - bias - width)
    if dtype == "float8_e5m2":
        size[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    elif dtype == "float8_e4m3fn":
        size[(code & 127) == 127] = np.nan
    else:
        size[128] = np.nan  # instead of a negative zero
    values: NDArray[Any] = np.copysign(size, 1 - 2 * (code >> 7)).astype(np.float32)
    return values
