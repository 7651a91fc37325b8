"""Whether the losses of cells that train the same agree."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerokit.bench.comparison.cells import Cell
from zerokit.errors import ZerokitError

# What decides which losses come out, in exact arithmetic. How a step is divided among ranks does not.
_DECISIVE = (
    *("model", "batch_size", "accumulate", "seq_len", "image_size", "nodes", "nproc_per_node"),
    *("precision", "wire", "data", "seed", "lr", "clip"),
)


def disagreements(cells: Sequence[Cell], tolerance: float) -> list[str]:
    """A sentence on every cell whose losses differ by more than this share from those of the first like it.

    Engines round differently in half precision: there only cells of one engine are to agree. The steps that both have
    are compared, warm-up included. Raises `ZerokitError` where no two runs train the same.
    """
    groups: dict[tuple[object, ...], list[tuple[str, Sequence[float | None]]]] = {}
    for cell in cells:
        for record in cell.measured_records:
            settings = record.settings
            if (
                settings.engine == "compute-only"
                or settings.elastic
                or record.checkpoints.resumed_from is not None
            ):
                continue
            key = tuple(getattr(settings, name) for name in _DECISIVE)
            engine = None if settings.precision == "fp32" and settings.wire == "own" else settings.engine
            groups.setdefault((*key, engine), []).append((cell.label, record.loss))
    if not any(len(group) > 1 for group in groups.values()):
        raise ZerokitError("no losses to compare: no two runs train the same model on the same batches")
    found = []
    for (first, known), *others in groups.values():
        for label, losses in others:
            step, share = _largest([*zip(known, losses, strict=False)])
            if share > tolerance:
                found.append(
                    f"{label}: the loss of step {step + 1} differs from that of {first} by {share:.2g} of it"
                )
    return list(dict.fromkeys(found))


def _largest(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[int, float]:
    """The step whose losses differ most, and by what share; a loss that was not finite agrees with another one."""
    shares = [
        (0.0 if one is other else math.inf)
        if one is None or other is None
        else abs(other - one) / max(abs(one), 1e-12)
        for one, other in pairs
    ]
    return max(enumerate(shares), key=lambda item: item[1], default=(0, 0.0))
