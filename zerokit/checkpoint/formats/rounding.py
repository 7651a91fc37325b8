"""Floating-point elements in another dtype, rounded: Hugging Face folders may have one of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def from_array(values: NDArray[Any], dtype: str) -> memoryview:
    """The bytes of floating-point `values` as float64, float32, float16 or bfloat16, rounded to nearest, ties to even.

    Raises `OverflowError` if a finite value is too large for `dtype`.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # a signalling nan is as good as any
        if dtype == "bfloat16":
            bits = values.astype("<f4", copy=False).view("<u4")
            # Two maxima tell that nothing is near the largest finite value, infinite or nan.
            small = not bits.size or (bits.view("<i4").max() < _ROUNDS_UP and bits.max() < _ROUNDS_UP | _SIGN)
            codes = _rounded(bits)
            if small:
                return codes.view(np.uint8).data
            codes[(bits & ~np.uint32(_SIGN)) > _INFINITE] = 0x7FC0  # adding may have made a zero of a nan
            infinite = (codes & 0x7FFF) == _INFINITE >> 16
        else:
            codes = values.astype(np.dtype(dtype).newbyteorder("<"))
            infinite = np.isinf(codes)
    lost = np.flatnonzero(infinite & np.isfinite(values))
    if lost.size:
        raise OverflowError(f"{values[lost[0]]:g} does not fit {dtype}")
    return codes.view(np.uint8).data


_SIGN, _INFINITE = 1 << 31, 0x7F800000
"""Bits of a float32."""

_ROUNDS_UP = 0x7F7F8000
"""The code of the smallest float32 that bfloat16 rounds to infinity."""


def _rounded(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """The upper halves of float32 codes, rounded to nearest, ties to even."""
    # In place: this is most of the time that a conversion takes.
    codes = bits >> 16
    codes &= 1
    codes += 0x7FFF
    codes += bits
    return codes.view("<u2")[1::2].copy()
