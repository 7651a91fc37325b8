"""Number formats of the tables of benches."""

from __future__ import annotations

MIB = 2**20


def ms(value: float) -> str:
    """A time in milliseconds, or in seconds from ten seconds on."""
    return f"{value:,.1f} ms" if abs(value) < 10_000 else f"{value / 1000:,.2f} s"


def mib(size_bytes: float) -> str:
    """A size in MiB; in GiB from ten GiB on, and in KiB below a tenth of a MiB."""
    if 0 < size_bytes < MIB / 10:
        return f"{size_bytes / 1024:,.1f} KiB"
    if size_bytes >= 10 * 1024 * MIB:
        return f"{size_bytes / MIB / 1024:,.1f} GiB"
    return f"{size_bytes / MIB:,.1f} MiB"


def rate(value: float) -> str:
    """A number without decimals from a hundred on, otherwise with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def loss(value: float | None) -> str:
    """A loss with four digits; None, in a record, stands for a diverged one."""
    return "not finite" if value is None else f"{value:.4f}"
