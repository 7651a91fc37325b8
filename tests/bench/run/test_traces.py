"""The files of timelines: where they go, what names them, and what is never sent."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.ranks import Ranks, Watcher, host, record_of
from tests.bench.records import make_record
from zerokit.bench.record.measured import Trace
from zerokit.bench.record.record import Record, read_record, write_record
from zerokit.bench.record.settings import Settings
from zerokit.bench.run.session import run_cell
from zerokit.bench.run.sweep import Sweep, SweepFolder, prepare, product, run_sweep
from zerokit.bench.run.traces import keep, read_trace, require_traces, traces_written
from zerokit.errors import UsageError
from zerokit.launch.failures import WorkerFailed

CONTENT: dict[str, Any] = {
    "traceEvents": [{"ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": 1.0, "name": "forward"}],
    "displayTimeUnit": "ms",
    "otherData": {"format": "zerokit.timeline/1"},
}
ZEROKIT = Settings(model="gpt-tiny", seq_len=16, data="synthetic", twin=False)


def traced(record: Record, file: str = "trace.json") -> Record:
    return replace(record, trace=Trace(file, 1.0, 1, 0.0))


class Tracing(Ranks):
    """Ranks that write a timeline where they are asked for one."""

    def __call__(self, module: str, arguments: Any, **more: Any) -> None:
        super().__call__(module, arguments, **more)
        job = Path(arguments[0])
        content = json.loads(job.read_text())
        if "trace" in content:
            (job.parent / content["trace"]).write_text(json.dumps(CONTENT))
            record = traced(record_of(self.asked[-1], content["sweep"]))
            write_record(record, job.parent / content["record"])


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_the_ranks_file_comes_to_the_users_with_its_records_id(name: str, tmp_path: Path) -> None:
    file = tmp_path / "new" / name
    written = run_cell(ZEROKIT, tmp_path / "r.json", host(Tracing(), Watcher()), trace=file)
    assert written == read_record(tmp_path / "r.json")
    assert written.trace == Trace(str(file), 1.0, 1, 0.0)
    data = file.read_bytes()
    content = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    assert content == CONTENT | {"otherData": {"format": "zerokit.timeline/1", "record": written.id}}
    assert [one.name for one in file.parent.iterdir()] == [name]
    assert read_trace(written) == (f"timeline.json{'.gz' if name.endswith('.gz') else ''}", data)
    assert traces_written([written, make_record()]) == {"trace": f"{file}  open in https://ui.perfetto.dev"}


def test_without_the_option_ranks_are_asked_for_none(tmp_path: Path) -> None:
    assert run_cell(ZEROKIT, tmp_path / "r.json", host(Tracing(), Watcher())).trace is None


def test_a_file_that_cannot_be_written_costs_the_timeline_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    watcher = Watcher()
    record = run_cell(
        ZEROKIT, tmp_path / "r.json", host(Tracing(), watcher), trace=tmp_path / "file" / "x.json"
    )
    assert record.status == "ok"
    assert record.trace is None
    (warning,) = watcher.warnings
    assert "the timeline cannot be written to" in warning
    assert keep(traced(make_record()), tmp_path, tmp_path / "y.json", watcher.warn).trace is None


def test_each_of_zerokits_cells_has_a_file_in_its_first_round(tmp_path: Path) -> None:
    fixed = {"model": "gpt-tiny", "seq_len": 16, "data": "synthetic", "twin": False}
    cells = product({"engine": ["zerokit", "ddp"], "stage": [0, 3]}, fixed, 2)
    folder = SweepFolder(tmp_path / "sweep")
    sweep = prepare(folder, Sweep.of(cells, {}))
    records = run_sweep(sweep, folder, host(Tracing(), Watcher()), trace=tmp_path / "t" / "step.json.gz")
    files = sorted(path.name for path in (tmp_path / "t").iterdir())
    assert len(files) == 2
    assert all(
        name.startswith("step-00") and name.endswith(".json.gz") and "zerokit" in name for name in files
    )
    named = [Path(record.trace.file).name for record in records if record.trace is not None]
    assert sorted(named) == files
    shown = traces_written(records)["trace"]
    assert " and 1 more  open in https://ui.perfetto.dev" in shown


@pytest.mark.parametrize("made", [True, False])
def test_ranks_that_fail_after_the_steps_cost_only_what_follows(made: bool, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text("of an earlier bench")

    def act(settings: Settings, job: Path) -> None:
        record = record_of(settings, None)
        if made:
            (job.parent / "trace.json").write_text(json.dumps(CONTENT))
        write_record(traced(record) if made else record, job.parent / "record.json")
        raise WorkerFailed("rank 1 was killed")

    watcher = Watcher()
    record = run_cell(ZEROKIT, tmp_path / "r.json", host(Ranks(act), watcher), trace=file)
    unknown = "the cost of communication is unknown"
    twin = "the compute-only twin, or collectives by themselves before it,"
    why = f"{unknown}: {twin}" if made else f"there is no timeline, and {unknown}: the step that is traced"
    assert watcher.warnings == [f"{why} failed: rank 1 was killed"]
    assert (read_trace(record) is not None) == made


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (replace(ZEROKIT, engine="ddp", stage=0), "and ddp has none: use torch.profiler"),
        (replace(ZEROKIT, every=5, nproc_per_node=2), "omit --every"),
    ],
)
def test_cells_that_can_have_none(settings: Settings, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason):
        require_traces(tmp_path / "x.json", [settings])
    require_traces(tmp_path / "x.json", [settings, ZEROKIT])
    ranks = Tracing()
    assert (
        run_cell(settings, tmp_path / "r.json", host(ranks, Watcher()), trace=tmp_path / "x.json").trace
        is None
    )
    assert len(ranks.asked) == 1


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder: give the name of a file, such as"):
        require_traces(tmp_path, [ZEROKIT])
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"x\.json cannot be written: \S+/file: File exists$"):
        require_traces(tmp_path / "file" / "x.json", [ZEROKIT])


@pytest.mark.parametrize(
    "stored",
    [
        b"root:x:0:0",
        b"{}",
        b"[1]",
        json.dumps(CONTENT).encode(),
        json.dumps(CONTENT | {"otherData": {"format": "zerokit.timeline/1", "record": "1" * 32}}).encode(),
        json.dumps(CONTENT | {"otherData": {"format": "other", "record": "0" * 32}}).encode(),
    ],
)
def test_only_the_timeline_of_the_record_itself_is_read(stored: bytes, tmp_path: Path) -> None:
    """A record may be somebody else's, and name any file of this machine."""
    for name, data in (("secret", stored), ("secret.gz", gzip.compress(stored)), ("broken.gz", stored)):
        (tmp_path / name).write_bytes(data)
        assert read_trace(traced(make_record(), str(tmp_path / name))) is None
    assert read_trace(traced(make_record(), str(tmp_path / "gone"))) is None
    assert read_trace(traced(make_record(), "/dev/zero")) is None
    assert read_trace(make_record()) is None
