"""Pictures as data: the figures in them are the records', said in the units that their titles name."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.bench.records import MIB, make_cell, make_failure, make_sweep, make_timeline
from zerokit.bench.comparison.cells import baselines, make_cells
from zerokit.bench.comparison.headlines import pareto
from zerokit.bench.record import Record, Samples
from zerokit.bench.record.runs import Run
from zerokit.bench.record.statistics import slowest
from zerokit.bench.report.pictures import Picture, make_pictures
from zerokit.bench.report.plots import Series, curves, scatter, strips
from zerokit.bench.report.theme import COLOURS, in_light


def pictures_of(*records: Record) -> dict[str, Picture]:
    runs = [Run("", records)]
    cells = make_cells(runs)
    return {picture.name: picture for picture in make_pictures(cells, baselines(cells, runs))}


def rows_of(plot: dict[str, Any], layer: int = 0) -> list[dict[str, Any]]:
    """The data of one of a picture's layers."""
    found: list[dict[str, Any]] = plot["datasets"][plot["layer"][layer]["data"]["name"]]
    return found


SWEEP = make_sweep()
NODES = {1: 100.0, 2: 110.0, 4: 125.0}  # and how long a step takes there, in milliseconds
WELL = [record for record in SWEEP if record.results is not None]


@pytest.fixture(scope="module")
def sweep() -> dict[str, Picture]:
    return pictures_of(*SWEEP)


@pytest.fixture(scope="module")
def scaling() -> dict[str, Picture]:
    """Two engines on 1, 2 and 4 nodes."""
    return pictures_of(
        *(
            make_cell(engine, 0, ms, nodes=nodes, jitter=0.0)
            for engine in ("zerokit", "ddp")
            for nodes, ms in NODES.items()
        )
    )


def test_a_sweep_has_every_picture_and_one_cell_those_of_its_own(sweep: dict[str, Picture]) -> None:
    own = ["steps", "communication", "phases", "state", "loss"]
    assert list(sweep) == ["throughput-tokens", "memory", "throughput-memory-tokens", *own]
    assert list(pictures_of(make_cell())) == own
    assert pictures_of(make_failure("failed", "why"), make_failure("killed", "signal 9", stage=3)) == {}
    assert all(": " in picture.label for picture in sweep.values())


def test_bars_are_the_records_figures_in_the_title_s_unit(sweep: dict[str, Picture]) -> None:
    picture = sweep["throughput-tokens"]
    assert picture.title == "Throughput, tokens/s"
    bars_ = rows_of(picture.plot)
    assert [bar["value"] for bar in bars_] == pytest.approx(
        [record.results.throughput for record in WELL if record.results]
    )
    encoding = picture.plot["layer"][0]["encoding"]
    assert (encoding["x"]["field"], encoding["x"]["stack"]) == ("value", "zero")
    assert encoding["tooltip"][-1]["title"] == "tokens/s"  # one run tells no noise between runs
    # What came to nothing has its row too, with the reason in its place.
    assert {row["text"] for row in rows_of(picture.plot, 1)} > {"failed", "out of memory"}
    peaks = [max(rank.peak_host_bytes for rank in record.ranks) / MIB for record in WELL]
    assert [bar["value"] for bar in rows_of(sweep["memory"].plot)] == pytest.approx(peaks)


def test_every_step_is_a_dot(sweep: dict[str, Picture]) -> None:
    picture = sweep["steps"]
    dots = {row["cell"]: [ms for _, ms in row["at"]] for row in rows_of(picture.plot, 1)}
    expected = slowest([rank.step_ms for rank in SWEEP[0].ranks])
    assert dots["zerokit 0"] == pytest.approx(expected, rel=1e-4)
    assert picture.plot["layer"][1]["encoding"]["x"]["axis"]["title"] == "ms"


def test_parts_of_a_bar_add_up(sweep: dict[str, Picture]) -> None:
    parts = [part for part in rows_of(sweep["state"].plot) if part["cell"] == "zerokit 3"]
    memory = SWEEP[3].ranks[0].memory_bytes
    assert memory is not None
    assert parts[0]["value"] == pytest.approx(memory["parameters"] / MIB)
    assert sum(part["value"] for part in parts) == pytest.approx(memory["total"] / MIB)
    assert [part["part"] for part in parts] == ["parameters", "gradients", "optimizer", "buffers and buckets"]
    costs = [part for part in rows_of(sweep["communication"].plot) if part["cell"] == "zerokit 3"]
    results = SWEEP[3].results
    assert results is not None
    assert sum(cost["value"] for cost in costs) == pytest.approx(results.step.p50)
    assert costs[-1]["value"] == pytest.approx(results.communication_ms)


def test_scaling_is_of_ranks_and_beside_what_would_be_ideal(scaling: dict[str, Picture]) -> None:
    curves_ = {row["cell"]: row["at"] for row in rows_of(scaling["scaling-tokens"].plot)}
    assert list(curves_) == ["zerokit 0", "DDP", "in proportion"]
    cells = [make_cell("ddp", 0, ms, nodes=nodes, jitter=0.0) for nodes, ms in NODES.items()]
    rates = [cell.results.throughput for cell in cells if cell.results]
    assert [point[0] for point in curves_["DDP"]] == [1.0, 2.0, 4.0]
    assert [point[1] for point in curves_["DDP"]] == pytest.approx(rates)
    shares = {row["cell"]: row["at"] for row in rows_of(scaling["efficiency-tokens"].plot)}
    assert shares["DDP"][0][1] == 1.0
    assert shares["DDP"][2][1] == pytest.approx(rates[2] / 4 / rates[0])
    assert "throughput-tokens-by-nodes" not in scaling
    assert scaling["efficiency-tokens"].told, "the batch is the same"


def test_a_number_that_varies_becomes_an_axis() -> None:
    records = [
        make_cell("zerokit", stage, step_ms=400.0 * batch, batch_size=batch)
        for stage in (0, 3)
        for batch in (1, 2, 8)
    ]
    plot = pictures_of(*records)["throughput-tokens-by-batch_size"].plot
    assert {row["cell"]: [x for x, _ in row["at"]] for row in rows_of(plot)} == {
        "zerokit 0": [1.0, 2.0, 8.0],
        "zerokit 3": [1.0, 2.0, 8.0],
    }
    x = plot["layer"][0]["encoding"]["x"]
    assert x["scale"]["type"] == "log"
    assert x["axis"]["values"] == [1.0, 2.0, 8.0]


@pytest.mark.parametrize(
    ("series", "title", "peak"),
    [
        ({"system_memory_usage_megabytes": [1048.576, None, 2097.152, 1.0]}, "Main", 2000.0),
        (
            {"system_memory_usage_megabytes": [9e6] * 4, "gpu_0_memory_usage_megabytes": [1048.576] * 4},
            "Device",
            1000.0,
        ),
    ],
)
def test_memory_over_time_is_what_the_sampler_read(
    series: dict[str, list[float | None]], title: str, peak: float
) -> None:
    record = make_cell()
    record.system[:] = [Samples(0, "here", 1.0, [0.0, 1.0, 2.0, 3.0], series, 1.0)]
    picture = pictures_of(record)["memory-over-time"]
    assert picture.title == f"{title} memory over time, MiB"
    assert max(y for _, y in rows_of(picture.plot)[0]["at"]) == pytest.approx(peak)


def test_memory_in_a_step_stands_on_each_other_in_its_kinds() -> None:
    picture = pictures_of(replace(make_cell(), timeline=make_timeline()))["memory-in-a-step"]
    assert picture.title == "Memory in the course of a step, MiB on rank 0"
    assert picture.label.endswith("peak 49.0, activations 20.0 of it")
    areas, borders, wholes = (rows_of(picture.plot, layer) for layer in (0, 1, 4))
    # From below: parameters, gradients, optimizer, buffers, activations.
    assert [row["at"][1] for row in areas] == [
        [0.5, a, b] for a, b in ((0, 8), (8, 12), (12, 28), (28, 29), (29, 49))
    ]
    assert [row["x"] for row in borders] == [0.25, 0.75]
    assert wholes[0]["at"][1] == [0.5, 0, 8, 4, 16, 1, 20]


def test_losses_that_lie_on_each_other_share_a_name(sweep: dict[str, Picture]) -> None:
    plot = sweep["loss"].plot
    assert [row["name"] for row in rows_of(plot, 1)] == [[f"all {len(WELL)}"]]
    curves_ = {row["cell"]: row["at"] for row in rows_of(plot)}
    assert curves_["DDP"] == [[step, loss] for step, loss in enumerate(SWEEP[4].loss)]
    assert {param["name"] for param in plot["params"]} == {"near", "zoom"}


def test_the_front_is_what_nothing_beats() -> None:
    assert pareto([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (2.0, 3.0)]) == [True, True, False, True]


def test_a_cost_below_its_error_is_within_noise_and_no_bar() -> None:
    record = make_cell(step_ms=500.0)  # and 605 ms alone: communication cannot make a step shorter
    picture = pictures_of(record)["communication"]
    assert [part["value"] for part in rows_of(picture.plot)][1] == 0.0
    assert "within noise" in picture.label
    assert "% of the step" in pictures_of(make_cell(step_ms=900.0))["communication"].label


def test_a_difference_of_single_runs_is_marked_as_not_known(sweep: dict[str, Picture]) -> None:
    assert "DDP 715 (+2.3 % ?)" in sweep["throughput-tokens"].label
    rounds = pictures_of(*make_sweep(3))["throughput-tokens"]
    assert " ?" not in rounds.label
    assert "var(--muted)" in {row["beside"] for row in rows_of(rounds.plot, 1)}


def test_steps_far_beyond_the_rest_are_counted_at_the_edge() -> None:
    values = [*(100.0 + step for step in range(20)), 5000.0]
    plot = strips([Series("cell", [*enumerate(values)], "ddp", "110")], [110.0], "ms")
    assert rows_of(plot)[0]["name"] == "110 (+1 ▸)"
    scale = plot["layer"][1]["encoding"]["x"]["scale"]
    assert scale["domain"][1] < 200.0
    assert scale["clamp"] is True


def test_names_do_not_cover_each_other() -> None:
    """Curves that end in one place, points that lie on each other: placed for the narrowest page."""
    ends = curves([Series(f"c{n}", [(0.0, 1.0), (5.0, 2.0)], "ddp", f"c{n}") for n in range(9)], "x", "y")
    lanes = sorted(row["dy"] for row in rows_of(ends, 1))
    assert len(lanes) == 9
    assert all(lower - upper >= 15 for upper, lower in itertools.pairwise(lanes))
    points = scatter([Series(f"cell {n}", [(1.0, 1.0)], "ddp", marked=True) for n in range(30)], "x", "y")
    places = [(row["dx"], row["dy"]) for row in rows_of(points, 2)]
    assert len(places) == len(set(places)) < 30


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_can_be_told_from_their_ground(dark: bool) -> None:
    ground = COLOURS["ground"][dark]
    for role, colours in COLOURS.items():
        if role in ("ground", "panel", "grid", "soft"):
            continue
        least = 4.5 if role in ("text", "muted", "better", "worse") else 3.0
        assert contrast(colours[dark], ground) >= least, role
        if role in ("text", "muted"):
            assert contrast(colours[dark], COLOURS["panel"][dark]) >= 4.5, role
    assert in_light("var(--zero-redundancy-optimizer)") == COLOURS["zero-redundancy-optimizer"][0]
