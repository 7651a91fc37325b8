"""What a page says first: nothing that the noise does not allow."""

from __future__ import annotations

from dataclasses import replace

from tests.bench.records import make_cell, make_sweep
from zerokit.bench.comparison.cells import make_cells
from zerokit.bench.comparison.differences import difference
from zerokit.bench.comparison.tables import Headline, best_headlines
from zerokit.bench.record.record import Record, Run


def best(*records: Record) -> dict[str, Headline]:
    return {one.title: one for one in best_headlines(make_cells([Run("", records)]))}


def with_cost(record: Record, cost_ms: float) -> Record:
    """The record with this cost of communication, known within 1 ms."""
    assert record.twin is not None
    assert record.results is not None
    own = [900.0 + cost_ms + noise for noise in (-1.0, 0.0, 1.0)]
    twin = replace(record.twin, step_ms=[900.0] * 3, own_ms=own, pace_ms=[900.0] * 3)
    return replace(record, twin=twin, results=replace(record.results, communication_ms=cost_ms))


def test_rounds_have_winners_and_single_runs_have_none() -> None:
    assert list(best(*make_sweep(3))) == ["Fastest", "Least memory", "Cheapest communication"]
    single = best(*make_sweep())
    assert {one.who for one in single.values()} == {"no clear winner"}
    assert {one.also for one in single.values()} == {
        "single runs do not decide: run several rounds (--repeats 3)"
    }
    assert list(best(make_cell())) == ["Throughput", "Memory", "Communication"]


def test_ranks_that_train_alone_win_nothing_and_their_losses_are_their_own() -> None:
    """They are the floor that the others are measured against."""
    records = [
        make_cell(engine, 0, ms, repeat=repeat, twin=False)
        for repeat in range(3)
        for engine, ms in (("ddp", 700.0), ("compute-only", 500.0))
    ]
    assert {one.who for one in best(*records).values()} == {"DDP"}
    alone, ddp = sorted(make_cells([Run("", tuple(records))]), key=lambda cell: cell.label == "DDP")
    assert difference(alone, ddp, "loss_last") is None
    assert difference(alone, ddp, "step/p50_ms") is not None


def test_who_is_within_the_noise_of_the_best_is_so_in_the_table_too() -> None:
    """Rounds are paired: 1 % is no noise where every round says so."""
    rounds = [
        make_cell(engine, 0, ms * pace, repeat=repeat, jitter=0.0, twin=False)
        for repeat, pace in enumerate((1.0, 1.2, 0.9))
        for engine, ms in (("ddp", 700.0), ("zerokit", 710.0), ("parameter-server", 700.0))
    ]
    fastest = best(*rounds)["Fastest"]
    assert fastest.who == "no clear winner"
    assert set(fastest.also.removeprefix("within the noise: ").split(" and ")) == {"DDP", "parameter server"}


def test_a_cost_that_is_not_above_its_error_is_no_headline() -> None:
    other = with_cost(make_cell("ddp", 0), 50.0)
    for cost_ms, told in ((-550.0, False), (0.5, False), (5.0, True)):
        found = best(with_cost(make_cell(), cost_ms), other)
        assert ("Cheapest communication" in found) == told, cost_ms
    alone = best(with_cost(make_cell(nodes=1), 5.0), other)
    assert alone["Communication"].who.startswith("DDP"), "one rank communicates with nobody"
