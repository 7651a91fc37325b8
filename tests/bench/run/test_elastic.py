"""Which launches are repeated with the ranks that remain, with made-up ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.ranks import Ranks, Watcher, host
from zerokit.bench.record.journal import Journal, Part
from zerokit.bench.record.record import Record, read_record
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.status import Outcome, Status, write_outcome
from zerokit.bench.run import session
from zerokit.bench.run.session import remaining, run_cell
from zerokit.bench.worker.twin import twin_settings
from zerokit.launch.failures import Failure, LaunchError, WorkerFailed


def ended(*ranks: tuple[int, int, int]) -> WorkerFailed:
    """By (rank, node, exit code)."""
    failures = [Failure(rank, node, 77, code, "", False, 0.0, None) for rank, node, code in ranks]
    return WorkerFailed(failures[0].describe() if failures else "not connected", failures)


KILL, TERM, ABRT, SEGV = (
    -int(number) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV)
)


@pytest.mark.parametrize(
    ("shape", "error", "left"),
    [
        ((2, 1), ended((1, 1, KILL), (0, 0, 1)), (1, 1)),
        ((1, 3), ended((1, 0, KILL)), (1, 2)),
        ((1, 3), ended((1, 0, SEGV), (2, 0, KILL), (0, 0, TERM)), (1, 1)),
        ((2, 2), ended((2, 1, KILL), (3, 1, KILL)), (1, 2)),
        # A node that lost a rank: without it there are more ranks than with fewer on each, and the other way round.
        ((4, 2), ended((5, 2, KILL)), (3, 2)),
        ((2, 4), ended((5, 1, KILL)), (2, 3)),
        ((2, 2), ended((0, 0, KILL), (1, 0, KILL)), (1, 2)),
        # Whatever happens one rank is left.
        ((1, 1), ended((0, 0, KILL)), (1, 1)),
        ((2, 1), ended((0, 0, KILL), (1, 1, KILL)), (1, 1)),
        # A rank that has lost its peer may abort; one by itself may have, too.
        ((1, 2), ended((1, 0, KILL), (0, 0, ABRT)), (1, 1)),
        ((1, 3), ended((1, 0, ABRT), (0, 0, ABRT)), (1, 2)),
        # Errors of the program, and ranks that were asked to end.
        ((1, 2), ended((1, 0, 1), (0, 0, TERM)), None),
        ((1, 2), ended((1, 0, 7)), None),
        ((1, 2), ended(), None),
    ],
)
def test_what_remains(shape: tuple[int, int], error: WorkerFailed, left: tuple[int, int] | None) -> None:
    settings = Settings(nodes=shape[0], nproc_per_node=shape[1], elastic=True, save="run")
    found = remaining(settings, error)
    assert (None if found is None else (found.nodes, found.nproc_per_node)) == left
    assert found is None or replace(found, nodes=shape[0], nproc_per_node=shape[1]) == settings


@pytest.mark.parametrize(
    ("mesh", "error", "left"),
    [
        (None, ended((1, 0, KILL)), (1, 5, 5, None)),
        ("3x2", ended((2, 1, KILL), (3, 1, KILL)), (2, 2, 5, "2x2")),
        ("3x2", ended((1, 0, KILL), (2, 1, KILL), (4, 2, KILL)), (3, 1, 5, "3x1")),
    ],
)
def test_islands_go_on_without_those_that_were_lost(
    mesh: str | None, error: WorkerFailed, left: tuple[int, int, int | None, str | None]
) -> None:
    settings = Settings(elastic=True, save="run", every=5, delay=2, nodes=3, nproc_per_node=2, mesh=mesh)
    found = remaining(settings if mesh else replace(settings, nodes=1, nproc_per_node=6), error)
    assert found is not None
    assert (found.nodes, found.nproc_per_node, found.every, found.mesh) == left


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(session, "oom_kills", lambda: 0)
    return Settings(
        model="gpt-tiny", seq_len=16, data="synthetic", nodes=3, elastic=True, save=str(tmp_path / "run")
    )


def run(
    settings: Settings, folder: Path, errors: Iterator[BaseException | None], max_restarts: int = 3
) -> tuple[Record, list[int], list[str]]:
    """The record, the world of each launch, the warnings; each launch begins a part and ends as `errors` say."""

    def act(settings: Settings, job: Path) -> None:
        assert settings.save is not None
        Journal(Path(settings.save)).begin_part(Part(settings.world, settings.nodes, 1, 0, 0, 1, ""))
        if (error := next(errors)) is not None:
            if isinstance(error, MemoryError):
                write_outcome(job, Outcome(Status.OUT_OF_MEMORY, "too little"))
                error = ended((1, 1, KILL))
            raise error

    ranks, watcher = Ranks(act), Watcher()
    here = replace(host(ranks, watcher), max_restarts=max_restarts)
    record = run_cell(settings, folder / "r.json", here, identity="i")
    return record, [asked.world for asked in ranks.asked], watcher.warnings


def test_restarts_are_bounded_and_the_job_can_go_on(tmp_path: Path, settings: Settings) -> None:
    kills = iter([ended((2, 2, KILL)), ended((1, 1, KILL)), None])
    record, worlds, _ = run(settings, tmp_path, kills, max_restarts=1)
    assert (record.status, worlds) == ("failed", [3, 2])
    assert [(part.world, part.ended.partition(" (perhaps")[0]) for part in record.parts] == [
        (3, "rank 2 (node 2, pid 77) was killed by SIGKILL"),
        (2, "rank 1 (node 1, pid 77) was killed by SIGKILL"),
    ]
    assert record.restarts == 1
    run(settings, tmp_path, iter([None]))
    assert read_record(tmp_path / "r.json").status == "ok"


@pytest.mark.parametrize(
    ("error", "kills", "status"),
    [
        (ended((1, 1, 1), (0, 0, TERM)), 3, "failed"),
        (LaunchError("no port"), 3, "failed"),
        (MemoryError(), 3, "out of memory"),
        (ended((1, 1, KILL)), 4, "out of memory"),  # by the kernel, for want of memory
    ],
)
def test_other_ends_are_not_restarted(
    tmp_path: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kills: int,
    status: str,
) -> None:
    counts = iter((3, kills))
    monkeypatch.setattr(session, "oom_kills", lambda: next(counts))
    record, worlds, _ = run(settings, tmp_path, iter([error]))
    assert (record.status, worlds) == (status, [3])


def test_checkpoints_and_twins_of_an_elastic_bench() -> None:
    elastic = Settings(elastic=True, save="run", nodes=2)
    for steps, save_every, saves_every in ((100, None, 10), (5, None, 1), (30, 7, 7)):
        assert replace(elastic, steps=steps, save_every=save_every).saves_every == saves_every
    assert twin_settings(replace(elastic, elastic=False)) is not None
    for alone in (elastic, Settings(), Settings(nodes=2, twin=False)):
        assert twin_settings(alone) is None  # its world may change, it has no peers, or none was asked for


@pytest.mark.parametrize(
    ("engine", "stage", "optimizer", "expected"),
    [
        ("zerokit", 3, "muon", 1),
        ("ddp", 0, "muon", 0),
        ("fsdp2", 3, "adamw", 1),
        ("fsdp2", 3, "muon", 0),  # every rank orthogonalises every matrix
    ],
)
def test_a_twin_steps_what_a_rank_of_its_cell_steps(
    engine: str, stage: int, optimizer: str, expected: int
) -> None:
    twin = twin_settings(Settings(engine=engine, stage=stage, optimizer=optimizer, nodes=2))
    assert twin is not None
    assert (twin.engine, twin.stage, twin.optimizer) == ("compute-only", expected, optimizer)
