"""Records become cells: repetitions together, labels that tell apart, partners by what varies; headlines."""

from __future__ import annotations

from dataclasses import replace

from tests.bench.records import make_cell, make_failure, make_sweep
from zerokit.bench.comparison.cells import Cell, conditions, make_cells, short_names
from zerokit.bench.comparison.differences import difference
from zerokit.bench.comparison.tables import Headline, best_headlines, columns_of
from zerokit.bench.record.journal import Part
from zerokit.bench.record.record import Record, Run


def run(*records: Record, name: str = "run") -> Run:
    return Run(name, records)


def labels(cells: list[Cell]) -> list[str]:
    return [cell.label for cell in cells]


def test_repetitions_are_one_cell_whatever_their_warm_up() -> None:
    first = make_cell()
    again = make_cell(repeat=1)
    again = replace(again, settings=replace(again.settings, warmup=23))
    broken = make_failure("failed", "why", batch_size=2, repeat=2, precision=None)
    unclipped = replace(broken, settings=replace(broken.settings, clip=None))  # which no rank fills in
    cell, other = make_cells([run(broken, first, unclipped, again)])
    assert cell.records == [first, again, broken]
    assert other.records == [unclipped]
    assert cell.status == "ok"
    assert cell.measured_records == [first, again]


def test_what_varies_is_in_the_label_and_nothing_else() -> None:
    cells = make_cells(
        [run(make_cell(bucket_mb=25.0), make_cell(bucket_mb=1.5), make_cell(bucket_mb=25.0, nodes=3))]
    )
    assert labels(cells) == [
        "zerokit 2 · 2 nodes · bucket 25 MiB",
        "zerokit 2 · 2 nodes · bucket 1.5 MiB",
        "zerokit 2 · 3 nodes · bucket 25 MiB",
    ]


def test_another_commit_or_machine_is_another_cell() -> None:
    record = make_cell()
    assert record.environment is not None
    other = replace(record, id="other", environment=replace(record.environment, cores=64))
    cells = make_cells([run(record, other)])
    assert len({cell.label for cell in cells}) == 2
    differing, equal = conditions(cells)
    assert differing == [("processor cores", ["2", "64"])]
    assert ("torch", "2.13.0") in equal
    commits = ["0123456789abcdef", "fedcba9876543210-dirty"]
    records = [
        replace(record, id=commit, environment=replace(record.environment, git_commit=commit))
        for commit in commits
    ]
    assert labels(make_cells([run(*records)])) == ["zerokit 2 · 01234567", "zerokit 2 · fedcba98-dirty"]


def test_equal_cells_of_two_runs_are_named_by_the_run_and_matched() -> None:
    runs = [run(*make_sweep(), name="old/sweep"), run(*make_sweep(), name="new/sweep")]
    cells = make_cells(runs)
    assert labels(cells)[:2] == ["old: zerokit 0", "new: zerokit 0"]  # beside its baseline
    for cell in cells:
        partner = cell.baseline
        if cell.run == "old/sweep":
            assert partner is None
        else:
            assert partner is not None
            assert partner.label == cell.label.replace("new:", "old:")


def test_runs_that_differ_as_a_whole_are_matched_by_what_varies_within_them() -> None:
    old = [make_cell("zerokit", stage, bucket_mb=25.0) for stage in (0, 1, 2)]
    new = [make_cell("zerokit", stage, bucket_mb=50.0) for stage in (2, 3)]
    runs = [run(*old, name="old"), run(*new, name="new")]
    cells = make_cells(runs)
    assert [partner and partner.label for partner in (cell.baseline for cell in cells)] == [
        None,
        None,
        None,
        "zerokit 2 · bucket 25 MiB",
        None,
    ]


def test_a_single_baseline_is_that_of_everything() -> None:
    """A run of one cell, or the first cell of the only run that went well."""
    cells = make_cells([run(make_cell("ddp", 0), name="base"), run(*make_sweep(), name="sweep")])
    assert cells[0].baseline is None
    assert {cell.baseline is cells[0] for cell in cells[1:]} == {True}
    cells = make_cells([run(make_failure("failed", "why", "compute-only", 1), *make_sweep())])
    assert {cell.baseline.label for cell in cells if cell.baseline is not None} == {"zerokit 0"}


def test_short_names_are_what_tells_apart() -> None:
    assert list(short_names(["/x/b/run.json", "/x/c/run.json"]).values()) == ["b", "c"]
    assert list(short_names(["/x/b/run.json", "/x/c/more/run.json", "y.json"]).values()) == [
        "x/b/run",
        "x/c/more/run",
        "y",
    ]
    assert list(short_names(["old.json", "new.json"]).values()) == ["old", "new"]
    assert short_names(["run", "run.json"]) == {"run": "run", "run.json": "run.json"}
    assert short_names([""]) == {"": ""}
    assert short_names(["a/\udcff", "a/b"]) == {
        "a/\udcff": r"\udcff",
        "a/b": "b",
    }  # no text, so no page can hold it


def test_a_restarted_bench_says_so_and_counts_the_steps_of_its_last_part() -> None:
    parts = [Part(2, 2, 1, 5, 0, 4, "rank 1 was killed"), Part(1, 1, 4, 44, 12, 2, "finished")]
    whole, restarted = make_cell(steps=30), make_cell(steps=44, elastic=True, save="run", nodes=1)
    assert len(restarted.ranks[0].step_ms) == 44
    rows = dict(conditions(make_cells([run(replace(restarted, parts=parts))]))[1])
    assert (rows["restarted"], rows["measured steps"]) == ("1×", "44")
    assert "elastic" not in rows
    assert "restarted" not in dict(conditions(make_cells([run(whole)]))[1])


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
    assert list(best(make_cell())) == ["Throughput", "Peak host", "Communication"]


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
        cells = make_cells([run(with_cost(make_cell(), cost_ms), other)])
        assert bool(columns_of(cells, ["comm/cost_ms"])[0].entries[1].change) == told, cost_ms
        found = best(with_cost(make_cell(), cost_ms), other)
        assert ("Cheapest communication" in found) == told, cost_ms
    alone = best(with_cost(make_cell(nodes=1), 5.0), other)
    assert alone["Communication"].who.startswith("DDP"), "one rank communicates with nobody"
