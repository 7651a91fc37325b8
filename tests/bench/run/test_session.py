"""One cell, with made-up ranks: a record comes of it whatever happens."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.ranks import Ranks, Watcher, host, record_of
from zerokit.bench.record.record import RecordError, read_record, write_record
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.status import Outcome, Progress, Status, write_outcome, write_progress
from zerokit.bench.run import session
from zerokit.bench.run.session import refusal, require_data, run_cell
from zerokit.errors import ZerokitError
from zerokit.launch.failures import Failure, WorkerFailed

SETTINGS = Settings(model="gpt-tiny", seq_len=16, data="synthetic")


def killed_rank() -> WorkerFailed:
    failure = Failure(1, 0, 77, -signal.SIGKILL, "", False, 0.0, None)
    return WorkerFailed(failure.describe(), [failure])


def fail(error: BaseException) -> Ranks:
    def act(settings: Settings, job: Path) -> None:
        raise error

    return Ranks(act)


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.iterdir() if path.name.startswith("zerokit-")]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_a_success_is_written_with_the_identity_that_was_asked_for(tmp_path: Path) -> None:
    step = Progress(1, 4, 2, 5.5, 12.0)

    def act(settings: Settings, job: Path) -> None:
        write_progress(job.parent / "progress", step)

    watcher = Watcher()
    record = run_cell(SETTINGS, tmp_path / "r.json", host(Ranks(act), watcher), sweep="s", identity="i")
    assert (record.id, record.sweep, record.status, record.cell) == ("i", "s", "ok", SETTINGS.key)
    assert read_record(tmp_path / "r.json") == record
    assert leftovers(tmp_path) == []
    assert watcher.shown == [step]


def test_a_model_that_cannot_fit_is_not_tried() -> None:
    here = host(Ranks(), Watcher())
    status, reason = refusal(Settings(model="gpt3-175b", device="cpu"), here) or ("", "")
    assert status == "out of memory"
    assert "gpt3-175b is too large" in reason
    with pytest.raises(ZerokitError, match="nowhere does not exist"):
        require_data(replace(SETTINGS, data="nowhere"), here)
    # Nobody is going to read the data of what cannot fit.
    require_data(Settings(model="gpt3-175b", device="cpu", data="nowhere"), here)
    elsewhere = replace(here, memory=None)
    assert refusal(Settings(model="gpt3-175b", device="cpu"), elsewhere) is None


def test_a_rank_that_ran_out_of_memory_says_so(tmp_path: Path) -> None:
    def act(settings: Settings, job: Path) -> None:
        write_outcome(job, Outcome(Status.OUT_OF_MEMORY, "out of memory: rank 1 wanted too much"))
        raise WorkerFailed("rank 0 failed: connection closed by peer")

    record = run_cell(SETTINGS, tmp_path / "r.json", host(Ranks(act), Watcher()))
    assert (record.status, record.reason) == ("out of memory", "rank 1 wanted too much")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(("before", "after", "status"), [(3, 4, "out of memory"), (3, 3, "failed")])
def test_a_killed_rank_ran_out_of_memory_if_the_kernel_killed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int, status: str
) -> None:
    """Logs that the reason names are kept."""
    counts = iter((before, after))
    monkeypatch.setattr(session, "oom_kills", lambda: next(counts))

    def act(settings: Settings, job: Path) -> None:
        error = killed_rank()
        raise WorkerFailed(f"{error}\nlogs: {job.parent}", error.failures)

    record = run_cell(SETTINGS, tmp_path / "r.json", host(Ranks(act), Watcher()))
    reason = record.reason or ""
    assert record.status == status
    assert "rank 1 (node 0, pid 77) was killed by SIGKILL" in reason
    assert ("probably" in reason) == (status == "out of memory")
    assert Path(reason.rpartition("logs: ")[2]).is_dir()


def test_a_mistake_of_ours_is_not_taken_for_a_result(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_cell(SETTINGS, tmp_path / "r.json", host(fail(ZeroDivisionError("oh")), Watcher()))
    assert read_record(tmp_path / "r.json").status == "failed"


def test_a_success_is_not_replaced_by_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_record(record_of(SETTINGS, None), path)
    record = run_cell(SETTINGS, path, host(fail(WorkerFailed("no")), Watcher()))
    assert record.status == "failed"
    assert read_record(path).status == "ok"
    path.write_text("damaged")
    run_cell(SETTINGS, path, host(fail(WorkerFailed("no")), Watcher()))
    assert read_record(path).status == "failed"


@pytest.mark.parametrize("ours", ["ok", "failed"])
def test_two_benches_that_choose_one_file_keep_both_records(tmp_path: Path, ours: str) -> None:
    path = tmp_path / "r.json"

    def act(settings: Settings, job: Path) -> None:
        write_record(replace(record_of(settings, None), id="theirs"), path)
        if ours == "failed":
            raise WorkerFailed("no")

    watcher = Watcher()
    run_cell(SETTINGS, path, host(Ranks(act), watcher), identity="ours")
    assert read_record(path).id == "theirs"
    second = read_record(tmp_path / "r-2.json")
    assert (second.id, second.status) == ("ours", ours)
    assert watcher.warnings == [
        f"another bench has written {path} meanwhile: this record is in {tmp_path / 'r-2.json'}"
    ]


def test_a_record_that_cannot_be_written_is_kept_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        RecordError, match=r"cannot be written to .*file/r\.json: .*; it is kept in "
    ) as caught:
        run_cell(SETTINGS, tmp_path / "file" / "r.json", host(Ranks(), Watcher()))
    kept = Path(str(caught.value).rpartition("kept in ")[2])
    assert read_record(kept).status == "ok"
