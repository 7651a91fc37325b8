"""How the tables of benches write numbers."""

from __future__ import annotations

MIB = 2**20


def ms(value: float) -> str:
    """Milliseconds, or seconds from ten on."""
    return f"{value:,.1f} ms" if abs(value) < 10_000 else f"{value / 1000:,.2f} s"


def mib(size_bytes: float) -> str:
    """MiB; GiB from ten on, and KiB below a tenth."""
    if 0 < size_bytes < MIB / 10:
        return f"{size_bytes / 1024:,.1f} KiB"
    if size_bytes >= 10 * 1024 * MIB:
        return f"{size_bytes / MIB / 1024:,.1f} GiB"
    return f"{size_bytes / MIB:,.1f} MiB"


def rate(value: float) -> str:
    """Whole from a hundred on, else three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def loss(value: float | None) -> str:
    """Four digits; None is what a record keeps of a diverged one."""
    return "not finite" if value is None else f"{value:.4f}"
