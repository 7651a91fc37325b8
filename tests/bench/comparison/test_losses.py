"""Which losses are set beside each other, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.records import make_cell
from zerokit.bench.comparison.cells import Cell, make_cells
from zerokit.bench.comparison.differences import disagreements, loss_note
from zerokit.bench.record.record import Run
from zerokit.errors import ZerokitError


def cells(precision: str, **factors: float) -> list[Cell]:
    """A cell an engine and stage, such as `ddp_0`, whose losses are the same ones times a factor."""
    records = []
    for name, factor in factors.items():
        engine, _, stage = name.rpartition("_")
        record = make_cell(engine.replace("_", "-"), int(stage), precision=precision)
        records.append(replace(record, id=name, loss=[5.0 * factor, 4.0 * factor]))
    return make_cells([Run("", tuple(records))])


def test_engines_are_compared_in_half_precision_by_a_tolerance_that_allows_their_rounding() -> None:
    half = cells("bf16", ddp_0=1.0, zerokit_2=1.005, zerokit_3=1.005)
    assert disagreements(half, 1e-5) == []
    assert disagreements(half, 2e-2) == []
    far = cells("bf16", ddp_0=1.0, zerokit_2=1.1, zerokit_3=1.1)
    assert len(disagreements(far, 2e-2)) == 2
    assert disagreements(far, 1e-5) == []
    alone = cells("bf16", ddp_0=1.0, zerokit_2=1.0)
    with pytest.raises(ZerokitError, match="no losses to compare"):
        disagreements(alone, 1e-5)


def test_the_floor_trains_something_else() -> None:
    found = cells("fp32", compute_only_0=3.0, ddp_0=1.0, zerokit_2=1.0)
    assert disagreements(found, 1e-5) == []
    assert loss_note(found) == "Losses of cells with equal training are bitwise identical."


def test_the_note_tells_engines_from_stages() -> None:
    found = cells("fp32", ddp_0=1.0, zerokit_2=1.001, zerokit_3=1.001)
    assert loss_note(found) == (
        "Losses of cells with equal training differ by at most 1.0e-03 of them; "
        "those of one engine are bitwise identical."
    )
    assert loss_note(cells("fp32", zerokit_2=1.0)) == ""


def test_local_steps_are_never_said_to_train_the_same() -> None:
    every_step = cells("fp32", zerokit_2=1.0, ddp_0=1.0)
    local = cells("fp32", zerokit_1=1.0)
    (record,) = local[0].measured_records
    local = make_cells([Run("", (replace(record, settings=replace(record.settings, every=8)),))])
    assert loss_note([*every_step[:1], *local]) == ""
    with pytest.raises(ZerokitError, match="no losses to compare"):
        disagreements([*every_step[:1], *local], 1e-5)
