"""What `verify` and `diff` found, as lines for a terminal. Imports no rich."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerokit.text import counted, decimal_size, printable

if TYPE_CHECKING:
    from zerokit.checkpoint.diff import Comparison, Difference
    from zerokit.checkpoint.verify import Report

_SHOWN = 20
"""Differences of one stream that are listed; two steps of one run differ in every parameter."""


def verified(report: Report) -> Iterator[str]:
    """The damage, if there is any, and the verdict."""
    for finding in report.findings:
        yield printable(str(finding))
    if report.missing:
        yield printable(report.missing)
    path = printable(str(report.path))
    whole = f"step {report.step} of {counted(report.world or 0, 'rank')}"
    read = f"{decimal_size(report.bytes_read)} read"
    if report.without_checksums and report.intact:
        yield f"{path}: headers and sizes are right; the format has no checksums, so bytes cannot be verified"
    elif report.intact:
        own = ", without its frozen parameters, which are the model's own" if report.without_frozen else ""
        yield f"{path}: intact: {whole}, {counted(report.slices, 'slice')}, {read}{own}"
    elif report.findings:
        yield f"{path}: damaged: {counted(len(report.findings), 'finding')}"
    else:
        yield f"{path}: incomplete: {whole}, {read}, which are right"


def differing(comparison: Comparison) -> Iterator[str]:
    """The first differences of each stream, then how many there are."""
    by_stream: dict[str, list[Difference]] = {}
    for difference in comparison.differences:
        by_stream.setdefault(difference.stream, []).append(difference)
    for stream, differences in by_stream.items():
        for one in differences[:_SHOWN]:
            sides = " → ".join(_short(side) for side in (one.a, one.b) if side is not None)
            yield printable(f"{one.change:7}  {stream}/{one.name}  {sides}")
        if len(differences) > _SHOWN:
            yield f"         and {len(differences) - _SHOWN} more of {printable(stream)} (--json lists all)"
    for line in comparison.layout:
        yield printable(f"layout   {line} (no difference of the state)")
    differ = counted(len(comparison.differences), "difference") if comparison.differences else "no difference"
    alone = " of the weights" if comparison.weights else ""
    rounded = f", {comparison.rounded} of them rounded as the other side is" if comparison.rounded else ""
    yield f"{differ}{alone}; {comparison.equal} equal by CRC-32{rounded}"


def _short(side: str) -> str:
    return side if len(side) <= 60 else f"{side[:59]}…"
