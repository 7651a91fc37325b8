"""Number formatting for people: significant digits only, and equal decimals within a column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from zerokit.bench.comparison.differences import Difference
from zerokit.bench.record.metrics import Measured

GIB_FROM = 10 * 1024.0
"""MiB from which GiB read better."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The format of one column: a factor, decimals and a unit."""

    unit: str
    factor: float
    decimals: int

    @classmethod
    def of(cls, unit: str, values: Sequence[float | None]) -> Scale:
        """Three digits of the typical value, in a unit that keeps it readable."""
        found = [abs(value) for value in values if value and math.isfinite(value)]
        typical = median(found) if found else 0.0
        factor = 1.0
        if unit == "MiB" and typical >= GIB_FROM:
            unit, factor = "GiB", 1 / 1024
        elif unit == "ms" and typical >= 10_000:
            unit, factor = "s", 1e-3
        typical *= factor
        decimals = 2 - math.floor(math.log10(typical)) if typical else 0
        return cls(unit, factor, min(max(decimals, 0), 4))

    def text(self, value: float | None) -> str:
        """A number with thousands separators and a real minus sign; "–" if there is no value."""
        if value is None:
            return "–"
        text = f"{value * self.factor:,.{self.decimals}f}"
        if not any(digit in text for digit in "123456789"):
            text = text.lstrip("-")
        return text.replace("-", "−")


def scale_of(name: str, unit: str, values: Sequence[float | None]) -> Scale:
    """The format of a metric's column: shares are in percent, losses with four decimals."""
    if name in ("mfu", "step/spread", "step/drift"):
        decimals = Scale.of("%", [None if value is None else 100 * value for value in values]).decimals
        return Scale("%", 100.0, min(max(decimals, 1), 2))
    if name.startswith("loss"):
        return Scale("", 1.0, 4)
    if name in ("skipped_steps", "traffic/elements_per_step"):
        return Scale(unit, 1.0, 0)
    return Scale.of(unit, values)


def percent(difference: Difference) -> str:
    """A signed change: "+6.5 %", "−12 %", "×3.2" for large ratios; "=" for no change."""
    share = difference.relative
    if share == 0.0:
        return "="
    if not math.isfinite(share):
        return "from 0"
    if share >= 1.0:
        return f"×{1 + share:.2g}" if share < 9 else f"×{1 + share:,.0f}"
    digits = 0 if abs(share) >= 0.0995 else 1
    text = f"{share * 100:+.{digits}f} %".replace("-", "−")
    return "0.0 %" if text[1:] == "0.0 %" else text


def within_noise(name: str, measured: Measured) -> bool:
    """Whether a cost is within its error; communication never makes a step shorter."""
    return name == "comm/cost_ms" and measured.value <= (measured.error or 0.0)


def count(number: float) -> str:
    """Rounded, with the usual letter: 34.9 K, 124.4 M, 8.0 B."""
    for letter, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:g}"
