"""Bytes of a checkpoint as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_array(content: bytes | bytearray | memoryview, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """The elements as an array of `shape`; bfloat16 and float8, which numpy does not have, as float32, exactly."""
    if dtype == "bfloat16":
        flat = (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif dtype == "float8_e5m2":  # the upper half of a float16
        flat = (np.frombuffer(content, np.uint8).astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    elif dtype == "float8_e4m3fn":
        flat = _e4m3fn()[np.frombuffer(content, np.uint8)]
    elif dtype == "bool":
        flat = np.frombuffer(content, np.uint8) != 0
    else:
        flat = np.frombuffer(content, np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False)
    return flat.reshape(shape)


def from_array(values: NDArray[Any], dtype: str) -> memoryview:
    """The bytes of floating-point `values` as float64, float32, float16 or bfloat16, rounded to nearest, ties to even.

    Raises `OverflowError` if a finite value is too large for `dtype`.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # a signalling nan is as good as any
        if dtype == "bfloat16":
            codes = _rounded(values.astype("<f4", copy=False).view("<u4"))
            infinite = (codes & 0x7FFF) == 0x7F80
        else:
            codes = values.astype(np.dtype(dtype).newbyteorder("<"))
            infinite = np.isinf(codes)
    if not infinite.any():
        return codes.view(np.uint8).data
    lost = np.flatnonzero(infinite & np.isfinite(values))
    if lost.size:
        raise OverflowError(f"{values[lost[0]]:g} does not fit {dtype}")
    return codes.view(np.uint8).data


def _rounded(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """The upper halves of float32 codes, rounded to nearest, ties to even; every nan becomes 0x7FC0."""
    # In place: this is most of the time that a conversion takes.
    codes = bits >> 16
    codes &= 1
    codes += 0x7FFF
    codes += bits
    halves: NDArray[np.uint16] = codes.view("<u2")[1::2].copy()
    nan = (bits & 0x7FFFFFFF) > 0x7F800000  # adding may have made a zero or an infinity of it
    if nan.any():
        halves[nan] = 0x7FC0
    return halves


def _e4m3fn() -> NDArray[np.float32]:
    """The value of each byte: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity (arXiv:2209.05433)."""
    code = np.arange(256)
    sign, exponent, mantissa = 1 - 2 * (code >> 7), (code >> 3) & 15, code & 7
    value = np.where(exponent > 0, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
    return np.where((code & 127) == 127, np.nan, np.copysign(value, sign)).astype(np.float32)
