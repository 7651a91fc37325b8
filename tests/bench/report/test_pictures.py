"""Pictures as data: the figures in them are the records', said in the units that their titles name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.bench.records import MIB, make_cell, make_failure, make_sweep
from zerokit.bench.comparison.cells import make_cells
from zerokit.bench.record.record import Record, Run
from zerokit.bench.record.statistics import slowest
from zerokit.bench.report.pictures import Picture, make_pictures


def pictures_of(*records: Record) -> dict[str, Picture]:
    return {picture.name: picture for picture in make_pictures(make_cells([Run("", records)]))}


def rows_of(plot: dict[str, Any], layer: int | None = None) -> list[dict[str, Any]]:
    """The data of a picture, or of one of its layers."""
    found: list[dict[str, Any]] = (plot if layer is None else plot["layer"][layer])["data"]["values"]
    return found


SWEEP = make_sweep()
WELL = [record for record in SWEEP if record.results is not None]


@pytest.fixture(scope="module")
def sweep() -> dict[str, Picture]:
    return pictures_of(*SWEEP)


def test_a_sweep_has_six_pictures_and_one_cell_those_of_its_own(sweep: dict[str, Picture]) -> None:
    own = ["state", "steps", "communication", "loss"]
    assert list(sweep) == ["throughput-tokens", "memory", *own]
    assert list(pictures_of(make_cell())) == own
    assert pictures_of(make_failure("failed", "why"), make_failure("killed", "signal 9", stage=3)) == {}
    assert all(": " in picture.label for picture in sweep.values())


def test_bars_are_the_records_figures_in_the_title_s_unit(sweep: dict[str, Picture]) -> None:
    picture = sweep["throughput-tokens"]
    assert picture.title == "Throughput, tokens/s"
    rates = [record.results.throughput for record in WELL if record.results]
    assert [bar["value"] for bar in rows_of(picture.plot, 0)] == pytest.approx(rates)
    # What came to nothing says so below its name.
    assert "failed" in picture.label
    assert "out of memory" in picture.label
    assert re.search(r"DDP \d{3} \([+−]\d\.\d % \?\)", picture.label)  # a single run does not tell the noise
    assert " ?" not in pictures_of(*make_sweep(3))["throughput-tokens"].label
    peaks = [max(rank.peak_host_bytes for rank in record.ranks) / MIB for record in WELL]
    assert [bar["value"] for bar in rows_of(sweep["memory"].plot, 0)] == pytest.approx(peaks)


def test_a_box_is_made_of_every_step(sweep: dict[str, Picture]) -> None:
    steps = [row["ms"] for row in rows_of(sweep["steps"].plot) if row["cell"].startswith("zerokit 0")]
    assert steps == pytest.approx(slowest([rank.step_ms for rank in SWEEP[0].ranks]), rel=1e-4)


def test_parts_of_a_bar_add_up(sweep: dict[str, Picture]) -> None:
    parts = [part for part in rows_of(sweep["state"].plot, 0) if part["cell"].startswith("zerokit 3")]
    memory = SWEEP[3].ranks[0].memory_bytes
    assert memory is not None
    assert parts[0]["value"] == pytest.approx(memory["parameters"] / MIB)
    assert sum(part["value"] for part in parts) == pytest.approx(memory["total"] / MIB)
    assert [part["part"] for part in parts] == ["parameters", "gradients", "optimizer", "buffers and buckets"]
    costs = [part for part in rows_of(sweep["communication"].plot, 0) if part["cell"].startswith("zerokit 3")]
    results = SWEEP[3].results
    assert results is not None
    assert sum(cost["value"] for cost in costs) == pytest.approx(results.step.p50)
    assert costs[-1]["value"] == pytest.approx(results.communication_ms)


def test_throughput_is_drawn_over_ranks_or_over_the_number_that_varies() -> None:
    """Over ranks, although only nodes vary; the legend of the colours has the curves' dashes, too."""
    cells = [
        make_cell(engine, 0, ms, nodes=nodes, nproc_per_node=2, jitter=0.0)
        for engine in ("zerokit", "ddp")
        for nodes, ms in ((1, 100.0), (2, 110.0), (4, 125.0))
    ]
    plot = pictures_of(*cells)["throughput-tokens"].plot
    names, rows = ["zerokit 0", "DDP", "in proportion"], rows_of(plot)
    assert list(dict.fromkeys(row["part"] for row in rows)) == names
    assert plot["encoding"]["strokeDash"]["scale"]["domain"] == names
    assert "legend" not in plot["encoding"]["strokeDash"]
    ddp = [(row["x"], row["y"]) for row in rows if row["part"] == "DDP"]
    assert [x for x, _ in ddp] == [2.0, 4.0, 8.0]
    assert [y for _, y in ddp] == pytest.approx(
        [cell.results.throughput for cell in cells[3:] if cell.results]
    )
    records = [make_cell("zerokit", stage, batch_size=batch) for stage in (0, 3) for batch in (1, 2, 8)]
    rows = rows_of(pictures_of(*records)["throughput-tokens"].plot)
    assert [(row["part"], row["x"]) for row in rows] == [
        (name, x) for name in ("zerokit 0", "zerokit 3") for x in (1.0, 2.0, 8.0)
    ]


def test_a_cost_below_its_error_is_within_noise_and_no_bar() -> None:
    record = make_cell(step_ms=500.0)  # and 605 ms alone: communication cannot make a step shorter
    picture = pictures_of(record)["communication"]
    assert [part["value"] for part in rows_of(picture.plot, 0)][1] == 0.0
    assert "within noise" in picture.label
    assert "% of the step" in pictures_of(make_cell(step_ms=900.0))["communication"].label


def test_losses_say_how_far_apart_they_are(sweep: dict[str, Picture]) -> None:
    rows = [row for row in rows_of(sweep["loss"].plot) if row["part"] == "DDP"]
    assert [(row["x"], row["y"]) for row in rows] == [*enumerate(SWEEP[4].loss)]
    assert sweep["loss"].told == pytest.approx(
        max(max(step) - min(step) for step in zip(*(record.loss for record in WELL), strict=False))
    )
