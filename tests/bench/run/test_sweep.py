"""A sweep over made-up ranks: what runs, what is kept, and how it goes on."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.bench.ranks import Ranks, Stopped, Watcher, host, record_of
from zerokit.bench.record.measured import Bandwidth
from zerokit.bench.record.record import Record, RecordError, write_record
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.status import Outcome, Status, write_outcome
from zerokit.bench.run.sweep import (
    Sweep,
    SweepError,
    SweepFolder,
    exit_code,
    prepare,
    product,
    run_sweep,
)
from zerokit.bench.tracking.content import sweep_status
from zerokit.errors import UsageError
from zerokit.launch.failures import WorkerFailed

FIXED = {"model": "gpt-tiny", "seq_len": 16, "data": "synthetic"}


def make(twin: bool = False, world: int = 2, repeats: int = 1, **options: Sequence[object]) -> Sweep:
    cells = product({**options, "nproc_per_node": (world,)}, {**FIXED, "twin": twin}, repeats)
    return Sweep.of(cells, {name: list(values) for name, values in options.items()})


def run(
    sweep: Sweep, folder: SweepFolder, ranks: Ranks | None = None, watcher: Watcher | None = None
) -> list[Record]:
    return run_sweep(sweep, folder, host(ranks or Ranks(), watcher or Watcher()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return SweepFolder(tmp_path / "sweep")


def at_stage(stage: int, error: Exception, outcome: Outcome | None = None) -> Ranks:
    """Ranks that fail at one stage."""

    def act(settings: Settings, job: Path) -> None:
        if settings.stage == stage:
            if outcome is not None:
                write_outcome(job, outcome)
            raise error

    return Ranks(act)


def test_a_cell_that_fails_does_not_end_the_sweep(folder: SweepFolder) -> None:
    sweep = prepare(folder, make(stage=(0, 1, 2)))
    watcher = Watcher()
    records = run(sweep, folder, at_stage(1, WorkerFailed("rank 0 failed: no")), watcher)
    assert [record.status for record in records] == ["ok", "failed", "ok"]
    assert watcher.lines == [(0, "ok", False), (1, "failed", False), (2, "ok", False)]
    assert {record.sweep for record in records} == {sweep.id}
    assert len({record.id for record in records}) == 3
    assert [path.name for path in sorted((folder.path / "cells").iterdir())] == [
        "000-zerokit-0.json",
        "001-zerokit-1.json",
        "002-zerokit-2.json",
    ]
    assert folder.records(sweep) == records
    assert exit_code(records) == 1
    assert sweep_status(sweep, records) == "FAILED"


def test_going_on_runs_only_what_has_no_result(folder: SweepFolder) -> None:
    sweep = prepare(folder, make(engine=("zerokit", "ddp"), stage=(0, 1, 2)))
    status = Outcome(Status.OUT_OF_MEMORY, "too much")
    run(sweep, folder, at_stage(1, WorkerFailed("no"), status))
    cells = {cell.label: cell for cell in sweep.cells}
    failed = cells["zerokit 2"]
    write_record(replace(folder.records(sweep)[2], status=Status.FAILED, reason="no"), folder.record(failed))
    folder.record(cells["zerokit 0"]).unlink()
    lacking = replace(folder.records(sweep)[-3], status=Status.UNSUPPORTED, reason="no such package")
    write_record(lacking, folder.record(cells["DDP"]))  # which has been installed since

    ranks, watcher = Ranks(), Watcher()
    records = run(folder.read(), folder, ranks, watcher)
    assert ranks.engines == [("zerokit", 0), ("zerokit", 2), ("ddp", 0)]
    assert [(status, before) for _, status, before in watcher.lines] == [
        ("ok", False),
        ("out of memory", True),
        ("ok", False),
        ("ok", False),
        ("unsupported", True),
        ("unsupported", True),
    ]
    assert exit_code(records) == 0
    assert sweep_status(sweep, records) == "FINISHED"


@pytest.mark.parametrize("at", range(4))
def test_an_interruption_anywhere_is_made_up_for(folder: SweepFolder, at: int) -> None:
    """The launch that is interrupted runs again, and no other does."""
    sweep = prepare(folder, make(stage=(1, 2), engine=("zerokit", "ddp"), accumulate=(1, 2)))
    wanted = [("zerokit", 1), ("zerokit", 2)] * 2

    def act(settings: Settings, job: Path) -> None:
        if len(ranks.asked) == at + 1:
            raise Stopped("enough")

    ranks = Ranks(act)
    with pytest.raises(Stopped):
        run(sweep, folder, ranks)
    assert ranks.engines == wanted[: at + 1]
    assert sweep_status(sweep, folder.records(sweep)) == "KILLED"

    rest = Ranks()
    records = run(folder.read(), folder, rest)
    assert rest.engines == wanted[at:]
    assert {record.status for record in records} == {"ok", "unsupported"}


@pytest.mark.parametrize(
    ("bandwidth", "culprit"), [(True, ""), (False, ", or collectives by themselves before it,")]
)
def test_what_fails_after_the_steps_is_warned_of_and_costs_no_cell(
    folder: SweepFolder, bandwidth: bool, culprit: str
) -> None:
    measured = [Bandwidth("all_reduce", "torch", 8, 1.0, 1.0, 1.0)] if bandwidth else []

    def act(settings: Settings, job: Path) -> None:
        if settings.stage == 2:  # after rank 0 has written what was measured
            record = replace(record_of(settings, None), bandwidth=measured)
            write_record(record, job.parent / "record.json")
        raise WorkerFailed("rank 0 failed: no twin\nlong story")

    watcher = Watcher()
    records = run(prepare(folder, make(stage=(1, 2))), folder, Ranks(act), watcher)
    assert [record.status for record in records] == ["failed", "ok"]
    assert watcher.warnings == [
        f"the cost of communication is unknown: the compute-only twin{culprit} failed: rank 0 failed: no twin"
    ]


def test_an_interrupted_twin_costs_no_measured_steps(folder: SweepFolder) -> None:
    def act(settings: Settings, job: Path) -> None:
        write_record(record_of(settings, None), job.parent / "record.json")
        raise Stopped("enough")

    sweep = prepare(folder, make(stage=(1, 2)))
    with pytest.raises(Stopped):
        run(sweep, folder, Ranks(act))
    assert [record.status for record in folder.records(sweep)] == ["ok"]


def test_a_folder_goes_on_with_the_same_cells_only(folder: SweepFolder) -> None:
    (folder.path.parent / "file").touch()
    with (
        pytest.raises(RecordError, match="choose another --output"),
        SweepFolder(folder.path.parent / "file" / "sweep").alone(),
    ):
        raise AssertionError("not reached")
    first = prepare(folder, make(stage=(1, 2)))
    assert prepare(folder, make(stage=(1, 2))) == first
    for other in (make(stage=(2, 1)), make(stage=(1, 2), batch_size=(8,)), make(stage=(1, 2, 3))):
        with pytest.raises(UsageError, match="has a sweep of other cells: continue it by --continue"):
            prepare(folder, other)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no sweep: there is no sweep.json in it"),
        ("{", "cannot read the sweep"),
        ("[]", "format None, expected 'zerokit.sweep/1'"),
        ('{"format": "zerokit.sweep/9"}', "format 'zerokit.sweep/9'"),
        ('{"format": "zerokit.sweep/1"}', "malformed sweep: id: missing"),
        ({"cells": []}, "its cells are not numbered from 0"),
        ({"cells": "all"}, "malformed sweep: cells: expected a list"),
        ("gpt-vast", r"malformed sweep: .*model 'gpt-vast' is unknown"),
    ],
)
def test_a_damaged_sweep_is_an_error_that_says_where(
    folder: SweepFolder, content: str | dict[str, object] | None, message: str
) -> None:
    folder.write(make(stage=(1, 2)))
    path = folder.path / "sweep.json"
    text = path.read_text()
    if isinstance(content, dict):
        content = json.dumps(json.loads(text) | content)
    elif content == "gpt-vast":
        content = text.replace('"gpt-tiny"', '"gpt-vast"')
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(SweepError, match=message):
        folder.read()


def test_a_damaged_record_is_not_taken_for_a_missing_one(folder: SweepFolder) -> None:
    sweep = prepare(folder, make(stage=(1, 2)))
    run(sweep, folder)
    folder.record(sweep.cells[1]).write_text("{")
    with pytest.raises(RecordError, match=r"001-zerokit-2\.json"):
        run(sweep, folder)


def test_two_processes_cannot_run_one_sweep(folder: SweepFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write(make(stage=(1, 2)))
    with folder.alone(), pytest.raises(SweepError, match="another zerokit bench is running"), folder.alone():
        raise AssertionError("not reached")
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOSYS, "no locks")))  # as on some Lustre
        with folder.alone():
            pass


@pytest.mark.parametrize(
    ("statuses", "code"),
    [("ok,out of memory", 0), ("unsupported,out of memory", 4), ("ok,failed", 1), ("killed", 1)],
)
def test_the_exit_code_follows_from_the_statuses(statuses: str, code: int) -> None:
    records = [Record("i", "c", Status(one), "2030-01-01", Settings()) for one in statuses.split(",")]
    assert exit_code(records) == code


def test_a_received_sweep_leads_nowhere_else(tmp_path: Path) -> None:
    """Neither by links, nor by cells that save."""
    mine, folder = tmp_path / "mine", SweepFolder(tmp_path / "sweep")
    mine.mkdir()
    (mine / "file").write_text("mine")
    sweep = Sweep.of([Settings()], {})
    folder.write(sweep)
    (folder.path / "cells").symlink_to(mine)
    (folder.path / "report.html").symlink_to(mine / "file")
    (folder.path / ".lock").symlink_to(mine / "file")
    for call in (
        lambda: folder.record(sweep.cells[0]),
        lambda: folder.report,
        lambda: folder.alone().__enter__(),
    ):
        with pytest.raises(SweepError, match="is a link that leads out of the sweep's folder: remove it"):
            call()
    assert (mine / "file").read_text() == "mine"
    folder.write(Sweep.of([Settings(save=str(mine))], {}))
    with pytest.raises(SweepError, match="cell 0 saves checkpoints"):
        folder.read()
