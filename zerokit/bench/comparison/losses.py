"""Checks that cells with equal training agree in their losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from zerokit.bench.comparison.cells import ALONE, Cell
from zerokit.bench.record.settings import LOSSY_WIRES, Settings
from zerokit.errors import ZerokitError

# What decides which losses come out, in exact arithmetic. How a step is divided among ranks does not.
_DECISIVE = (
    *("model", "batch_size", "accumulate", "seq_len", "image_size", "nodes", "nproc_per_node"),
    *("precision", "wire", "wire_updates", "data", "seed", "lr", "clip", "every", "fragments", "delay"),
)


ROUNDING = 1e-2
"""A tolerance from which on engines are compared in half precision as well, where each rounds at other points."""

_Losses = tuple[str, Sequence[float | None]]


def disagreements(cells: Sequence[Cell], tolerance: float) -> list[str]:
    """A sentence for every cell whose losses differ by more than this share from those of the first comparable cell.

    In half precision engines round differently: a tolerance below `ROUNDING` is for the cells of one engine there. The
    steps that both have are compared, warm-up included. Raises `ZerokitError` where no two runs train the same.
    """
    groups = _alike(cells, lambda settings: tolerance < ROUNDING and _rounds(settings))
    if not groups:
        raise ZerokitError("no losses to compare: no two runs trained the same model on the same batches")
    found = []
    for (first, known), *others in groups:
        for label, losses in others:
            step, share = _largest([*zip(known, losses, strict=False)])
            if share > tolerance:
                found.append(
                    f"{label}: the loss of step {step + 1} differs from that of {first} by {share:.2g} of it"
                )
    return list(dict.fromkeys(found))


def loss_note(cells: Sequence[Cell]) -> str:
    """The largest loss difference between cells with equal training, and within one engine; "" if there are none.

    Cells on a wire that changes the mathematics are left out.
    """
    cells = [cell for cell in cells if not any(r.settings.wire in LOSSY_WIRES for r in cell.measured_records)]

    def say(by_engine: bool) -> str | None:
        groups = [g for g in _alike(cells, lambda _: by_engine) if len({label for label, _ in g}) > 1]
        shares = [_largest([*zip(g[0][1], losses, strict=False)])[1] for g in groups for _, losses in g[1:]]
        if not shares:
            return None
        return f"differ by at most {max(shares):.1e} of them" if max(shares) else "are bitwise identical"

    among_all, of_one = say(False), say(True)
    if among_all is None:
        return ""
    within = "" if of_one in (None, among_all) else f"; those of one engine {of_one}"
    return f"Losses of cells with equal training {among_all}{within}."


def _alike(cells: Sequence[Cell], apart: Callable[[Settings], bool]) -> list[list[_Losses]]:
    """Labels and losses of runs that train the same, together; `apart`: only with others of the same engine."""
    groups: dict[tuple[object, ...], list[_Losses]] = {}
    for cell in cells:
        for record in cell.measured_records:
            settings = record.settings
            resumed = settings.elastic or record.checkpoints.resumed_from is not None
            if settings.engine != ALONE and not resumed:
                key = tuple(getattr(settings, name) for name in _DECISIVE)
                # Islands that meet now and then are another training in each engine, and on each mesh.
                local = (settings.engine, settings.mesh) if settings.every is not None else None
                engine = settings.engine if apart(settings) else None
                groups.setdefault((*key, local, engine), []).append((cell.label, record.loss))
    return [group for group in groups.values() if len(group) > 1]


def _rounds(settings: Settings) -> bool:
    return settings.precision != "fp32" or settings.wire != "own"


def _largest(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[int, float]:
    """The step whose losses differ most, and by what share; a loss that was not finite agrees with another one."""
    shares = [
        (0.0 if one is other else math.inf)
        if one is None or other is None
        else abs(other - one) / max(abs(one), 1e-12)
        for one, other in pairs
    ]
    return max(enumerate(shares), key=lambda item: item[1], default=(0, 0.0))
