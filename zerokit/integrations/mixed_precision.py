"""The precision that a library's name of mixed precision stands for."""

from __future__ import annotations

from zerokit.errors import UsageError
from zerokit.runtime import Precision
from zerokit.runtime.precision import PrecisionArgument

_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}


def choose_precision(precision: PrecisionArgument | None, mixed: str, argument: str) -> Precision:
    """`precision`, or that of accelerate's name `mixed`. Raises `UsageError` if they contradict each other."""
    if mixed not in _PRECISIONS:
        raise UsageError(f"{argument}={mixed!r}: expected one of {', '.join(map(repr, _PRECISIONS))}")
    implied = Precision.of(_PRECISIONS[mixed])
    if precision is None:
        return implied
    chosen = Precision.of(precision)
    if mixed != "no" and chosen.compute != implied.compute:
        raise UsageError(
            f"precision computes in {chosen.compute}, but {argument} says {mixed!r}: leave one of them out"
        )
    return chosen
