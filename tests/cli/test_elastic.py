"""`zerokit bench --elastic`, also under torchrun: ranks are killed, others go on with the data and without them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import zerokit
from tests.cli.commands import CLI, FORKS, Torchrun, processes_of, wait_for, zerokit_forked
from tests.cli.elastic import (
    MODEL,
    copy_run,
    hold_at,
    kill_rank,
    let_go,
    prepare,
    require_plain_order,
    trained,
)
from tests.cli.inside import Strike, zerokit_inside
from tests.support.processes import children_of
from zerokit.bench.record.record import Record, read_record
from zerokit.network import free_port

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # MLflow's
    pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tie a process to its parent"),
]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # the bits depend on it
ELASTIC = ("bench", *MODEL, "--elastic", "--save", "run", "--save-every", "3")


class Bench:
    """Elastic benches in a folder, with an experiment of its own in the MLflow of all."""

    def __init__(self, folder: Path, uri: str) -> None:
        self._folder, self._uri = folder, uri

    def __call__(
        self,
        *options: str,
        strike: Strike | None = None,
        code: int = 0,
        mlflow: bool = True,
        to: str = "record.json",
    ) -> CompletedProcess[str]:
        where = ("--tracking-uri", self._uri, "--experiment", str(self._folder))
        words = (*ELASTIC, "--output", to, *options, *(where if mlflow else ("--no-mlflow",)))
        done = zerokit_inside(self._folder, *words, meanwhile=strike or (lambda rank: None), **ONE_THREAD)
        assert done.returncode == code, done.stdout + done.stderr
        assert strike is None or strike.done
        return done

    def runs(self) -> list[Any]:
        """Runs of MLflow."""
        from mlflow import MlflowClient

        client = MlflowClient(self._uri)
        experiment = client.get_experiment_by_name(str(self._folder))
        assert experiment is not None
        return list(client.search_runs([experiment.experiment_id]))


@pytest.fixture
def bench(tmp_path: Path, mlflow_uri: str) -> Bench:
    return Bench(tmp_path, mlflow_uri)


def resumed(folder: Path, step: int, steps: int, *world: str, run: str = "run") -> Record:
    """What a plain bench makes of the checkpoint of `step`, which is no elastic one."""
    copy_run(folder / run, folder / "copy", step)
    output = ("--output", "copy.json", "--no-mlflow", "--save", "copy", "--resume")
    plain = ("bench", *MODEL, "--warmup", "0", "--steps", str(steps), *output)
    done = zerokit_forked(folder, *plain, *world, **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return read_record(folder / "copy.json")


def memory(folder: Path, to: str = "/dev/shm") -> Path:
    """The directory of the job's copies."""
    return Path(to, f"zerokit-{json.loads((folder / 'run/elastic/job.json').read_text())['id']}")


def copied(folder: Path, step: int, to: str = "/dev/shm") -> Callable[[], bool]:
    """Whether the copy of a step is complete on a node: its directory is in place, and named."""

    def look() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return (memory(folder, to) / "latest").read_text().startswith(f"step-{step:08d} ")
        return False

    return look


def spoil(run: Path, step: int) -> None:
    """Whoever reads the step from now on finds it damaged."""
    for file in (run / f"step-{step:08d}").iterdir():
        file.write_bytes(b"spoilt")


def kill_when(condition: Callable[[], bool], seen: Path, rank: int) -> Strike:
    """Kill a rank that is held; those of the next part are not held."""

    def kill(_: int) -> None:
        let_go(seen)
        kill_rank(seen, rank)

    return Strike(condition, kill)


def test_a_killed_rank_leaves_the_other_nodes_ranks_with_the_bits_of_a_run_of_their_number(
    tmp_path: Path, bench: Bench
) -> None:
    """Killed between two saves: exactly the steps since the first of them are repeated."""
    strike = kill_when(trained(tmp_path, 0, 5), prepare(tmp_path, hold=5), rank=3)
    said = bench("--nodes", "2", "--nproc-per-node", "2", "--steps", "9", strike=strike).stderr
    assert "rank 3 (node 1, pid" in said
    assert "restart 1 of at most 3: 2 ranks left" in said
    record = read_record(tmp_path / "record.json")
    first, second = record.parts
    assert (first.world, first.nodes, first.first_step, first.last_step) == (4, 2, 1, 5)
    assert "was killed by SIGKILL" in first.ended
    assert (second.world, second.nodes, second.first_step, second.last_step) == (2, 1, 4, 9)
    assert second.ended == "finished"
    assert (first.first_sample, first.samples_per_step, second.first_sample) == (0, 8, 24)
    require_plain_order(tmp_path, record.parts)
    # Figures are of the last part, losses of the whole job.
    assert (record.settings.nodes, record.settings.world, len(record.ranks)) == (1, 2, 2)
    assert len(record.ranks[0].warmup_ms + record.ranks[0].step_ms) == 6
    assert (len(record.loss), len(record.gradient_norm), record.untimed_steps) == (9, 9, 3)
    plain = resumed(tmp_path, 3, 6, "--nproc-per-node", "2")
    assert record.loss[3:] == plain.loss
    assert record.gradient_norm[3:] == plain.gradient_norm
    (run,) = bench.runs()
    assert (run.info.status, run.data.params["world"]) == ("FINISHED", "2")


def test_a_restart_resumes_from_memory_and_reads_nothing_of_the_run(tmp_path: Path, bench: Bench) -> None:
    """The run's step is spoilt, and the ranks begin after the copy, which is newer."""
    seen = prepare(tmp_path, hold=5)
    reached, complete = trained(tmp_path, 0, 5), copied(tmp_path, 4)

    def strike(_: int) -> None:
        kept = memory(tmp_path)
        assert stat.S_IMODE(kept.stat().st_mode) == 0o700
        shutil.copytree(kept, tmp_path / "kept")
        (tmp_path / "kept" / "step-00000004" / "node.json").unlink()
        spoil(tmp_path / "run", 3)
        let_go(seen)
        kill_rank(seen, 2)

    options = ("--nproc-per-node", "3", "--steps", "9", "--copies", "2", "--copy-every", "4")
    said = bench(*options, strike=Strike(lambda: reached() and complete(), strike)).stdout
    record = read_record(tmp_path / "record.json")
    assert [(part.world, part.first_step, part.last_step, part.where) for part in record.parts] == [
        (3, 1, 5, ""),
        (2, 5, 9, "copies"),
    ]
    require_plain_order(tmp_path, record.parts)
    done = record.checkpoints
    assert (done.resumed_from, done.resumed_where, done.notes) == (4, "copies", [])
    assert "from copies in memory" in said
    assert done.copies is not None
    assert (done.copies.step, done.copies.count) == (8, 1)
    assert not memory(tmp_path).exists(), "a finished job leaves nothing in memory"
    plain = resumed(tmp_path, 4, 5, "--nproc-per-node", "2", run="kept")
    assert record.loss[4:] == plain.loss
    assert done.copies.node_bytes[0] > sum(
        file.stat().st_size for file in (tmp_path / "run" / "step-00000009").glob("*.safetensors")
    )
    (run,) = bench.runs()
    assert run.data.params["copies"] == "2"
    assert run.data.tags["zerokit.resumed"] == "step 4 from copies"


@pytest.mark.full
def test_without_room_in_memory_the_run_is_resumed_and_says_why(tmp_path: Path, bench: Bench) -> None:
    """As the copies' directory is another user's, or no directory: the training goes on without them."""
    seen = prepare(tmp_path, hold=5)
    (tmp_path / "file").touch()
    strike = kill_when(trained(tmp_path, 0, 5), seen, rank=1)
    options = ("--nproc-per-node", "2", "--steps", "7", "--copies", "2", "--copy-every", "2")
    bench(*options, "--copy-to", "file", strike=strike, mlflow=False)
    record = read_record(tmp_path / "record.json")
    assert [(part.world, part.first_step, part.where) for part in record.parts] == [(2, 1, ""), (1, 4, "run")]
    assert record.checkpoints.copies is None
    assert any("has no copies" in note and "file" in note for note in record.checkpoints.notes)
    require_plain_order(tmp_path, record.parts)


@pytest.mark.full(default="2")
@pytest.mark.parametrize("islands", [3, 2])
def test_islands_go_on_from_the_last_round_without_one_that_was_killed(
    tmp_path: Path, bench: Bench, islands: int
) -> None:
    strike = kill_when(trained(tmp_path, 0, 5), prepare(tmp_path, hold=5), rank=1)
    options = ("--nproc-per-node", str(islands), "--every", "2", "--steps", "9")
    bench(*options, strike=strike, mlflow=False)
    record, left = read_record(tmp_path / "record.json"), islands - 1
    assert [(part.world, part.first_step, part.last_step) for part in record.parts] == [
        (islands, 1, 5),
        (left, 4, 9),
    ]
    require_plain_order(tmp_path, record.parts)
    assert record.settings.every == (2 if left > 1 else None)
    assert zerokit.list_steps(tmp_path / "run")[-1] == 9
    former = [path.name for path in (tmp_path / "run").glob("former-*")]
    assert former == (["former-island-2-until-step-00000006"] if left > 1 else [])


def test_an_interrupted_job_goes_on_with_more_ranks_and_leaves_one_record_and_one_run(
    tmp_path: Path, bench: Bench
) -> None:
    seen = prepare(tmp_path, hold=4)
    interrupt = Strike(trained(tmp_path, 0, 4), lambda rank: os.kill(os.getpid(), signal.SIGINT))
    bench("--steps", "8", strike=interrupt, code=128 + signal.SIGINT)
    assert read_record(tmp_path / "record.json").status == "killed"
    let_go(seen)
    bench("--steps", "8", "--nodes", "2")
    record = read_record(tmp_path / "record.json")
    assert [(part.world, part.first_step, part.last_step, part.ended) for part in record.parts] == [
        (1, 1, 4, "interrupted by SIGINT"),
        (2, 4, 8, "finished"),
    ]
    require_plain_order(tmp_path, record.parts)
    plain = resumed(tmp_path, 3, 5, "--nodes", "2")
    assert record.loss[3:] == plain.loss
    assert [run.info.status for run in bench.runs()] == ["FINISHED"]
    # All is trained: the same command has that result. Another one finds nothing left to begin.
    bench("--steps", "8")
    assert read_record(tmp_path / "record.json") == record
    again = bench("--steps", "8", "--lr", "0.5", code=1, mlflow=False)
    assert "run already has step 8, and an elastic bench ends at step 8: give more --steps" in again.stderr
    # More steps are another job, with a record and a run of its own.
    bench("--steps", "9")
    more = read_record(tmp_path / "record.json")
    assert more.id != record.id
    assert (len(more.loss), len(bench.runs())) == (1, 2)


@pytest.mark.full(default="*.Store.write")
@pytest.mark.parametrize(
    "place",
    ["bench.tracking.push.Mirror.push", "bench.tracking.store.Store.write", "terminal.display.Display.files"],
)
def test_a_job_killed_once_its_record_is_there_is_completed_by_the_same_command(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Before MLflow is filled, in the middle of it, and when nothing but the output is left to do."""
    prepare(tmp_path, hold=None)

    class Killed(BaseException):
        pass

    def kill(*arguments: object, **more: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(f"zerokit.{place}", kill)
        with pytest.raises(Killed):
            bench("--steps", "5", to="records")
    (path,) = (tmp_path / "records").iterdir()
    before = path.read_bytes()
    for _ in range(2):
        bench("--steps", "5", to="records")
        assert [record.read_bytes() for record in (tmp_path / "records").iterdir()] == [before]
        assert [run.info.status for run in bench.runs()] == ["FINISHED"]


@pytest.mark.full
def test_a_job_killed_after_its_last_step_is_told_to_the_end_without_figures(
    tmp_path: Path, bench: Bench
) -> None:
    """As by a kill between the last save and the record: nothing is trained twice to have something to measure."""
    seen = prepare(tmp_path, hold=5)  # in the pass that counts memory, after the last step
    reached, saved = trained(tmp_path, 0, 5), (tmp_path / "run" / "step-00000005" / "manifest.json").exists
    strike = kill_when(lambda: reached() and saved(), seen, rank=1)
    bench("--nproc-per-node", "2", "--steps", "5", strike=strike)
    record = read_record(tmp_path / "record.json")
    assert record.status == "ok"
    assert (record.results, record.phases, len(record.loss)) == (None, None, 5)
    assert [(part.world, part.first_step, part.last_step) for part in record.parts] == [(2, 1, 5), (1, 6, 5)]
    assert [run.info.status for run in bench.runs()] == ["FINISHED"]
    compared = zerokit_inside(tmp_path, "compare", "record.json", "--html", "page.html")
    assert compared.returncode in (0, 1), compared.stderr
    assert "Traceback" not in compared.stderr


@contextlib.contextmanager
def torchrun(folder: Path, tag: str, *options: str, more: tuple[str, ...] = ()) -> Iterator[Torchrun]:
    """An agent; its processes are known by `tag`, and end with this context. `more` are options of the bench."""
    words = (
        *FORKS,
        *options,
        CLI,
        *ELASTIC,
        "--output",
        "record.json",
        "--steps",
        "12",
        "--no-mlflow",
        *more,
    )
    variables = {
        "TAG": tag,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Else torch 2.13's agents wait for each other in vain when a node joins later.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if tag != "alone" else "0",
    }
    with Torchrun(folder, words, **variables) as process:
        try:
            yield process
        finally:
            kill_all(folder, tag, process)


def kill_all(folder: Path, tag: str, agent: Torchrun) -> None:
    """A machine that is gone: the agent and all that it has started, before one of them notices."""
    agent.send_signal(signal.SIGSTOP)
    ranks = [pid for pid, seen in processes_of(folder).items() if seen.get("TAG") == tag]
    for pid in [*children_of(agent.pid), *ranks]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.kill()


def ended(process: Torchrun) -> None:
    said, errors = process.communicate(timeout=800)
    assert process.returncode == 0, said + errors


def test_a_killed_rank_is_started_anew_by_torchrun(tmp_path: Path) -> None:
    """On one node the store of the agent outlives the ranks, with what the former ones have said there."""
    seen = prepare(tmp_path, hold=5)
    with torchrun(
        tmp_path, "alone", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"
    ) as process:
        wait_for(trained(tmp_path, 0, 5), process)
        let_go(seen)
        kill_rank(seen, 1)
        ended(process)
    record = read_record(tmp_path / "record.json")
    assert [(part.world, part.first_step, part.last_step) for part in record.parts] == [(2, 1, 5), (2, 4, 12)]
    assert "was killed by SIGKILL" in record.parts[0].ended
    require_plain_order(tmp_path, record.parts)
    whole = zerokit_forked(
        tmp_path,
        *("bench", *MODEL, "--nproc-per-node", "2", "--warmup", "0", "--steps", "12"),
        *("--output", "whole.json", "--no-mlflow"),
        OMP_NUM_THREADS="1",
    )
    assert whole.returncode == 0, whole.stderr
    assert record.loss == read_record(tmp_path / "whole.json").loss
    assert processes_of(tmp_path) == {}


@pytest.mark.full
def test_a_node_that_leaves_shrinks_the_job_and_one_that_comes_grows_it(tmp_path: Path) -> None:
    seen = prepare(tmp_path, hold=5)
    nodes = (
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", "127.0.0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "test"),
        "--rdzv-conf",
    )
    # The first one has the rendezvous: whoever has it must not leave. The second waits for it, so as not to be late.
    host, guest = "is_host=true,last_call_timeout=8", "is_host=false,last_call_timeout=8"
    with (
        torchrun(tmp_path, "second", *nodes, guest) as second,
        torchrun(tmp_path, "first", *nodes, host) as first,
    ):
        wait_for(trained(tmp_path, 0, 5), first)
        kill_all(tmp_path, "second", second)
        hold_at(seen, 1000)
        wait_for(lambda: b"ended" in part(tmp_path, 0) or bool(part(tmp_path, 1)), first)
        hold_at(seen, 4)
        wait_for(trained(tmp_path, 1, 7), first)
        let_go(seen)
        with torchrun(tmp_path, "third", *nodes, guest) as third:
            ended(first)
            ended(third)
    record = read_record(tmp_path / "record.json")
    alone = record.parts[
        1
    ].last_step  # it goes on until the third is there, whose part begins behind the last save
    assert [(part.world, part.first_step, part.last_step) for part in record.parts] == [
        (2, 1, 5),
        (1, 4, alone),
        (2, alone // 3 * 3 + 1, 12),
    ]
    assert alone >= 7
    require_plain_order(tmp_path, record.parts)
    assert (record.settings.world, record.restarts, len(record.loss)) == (2, 2, 12)


@pytest.mark.full
def test_nodes_resume_from_each_others_memory_where_one_is_lost_with_its_own(tmp_path: Path) -> None:
    """Each node has a folder, in which its copies are; one is killed, and its folder is gone. An empty one joins."""
    shared = tmp_path / "shared"
    seen = prepare(shared, hold=5)
    folders = {name: tmp_path / name for name in ("first", "second", "third")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "mine.py").write_text((shared / "mine.py").read_text())
        (folder / "seen").symlink_to(seen)
    more = (
        *("--save", str(shared / "run"), "--save-every", "100", "--output", str(shared / "record.json")),
        *("--copies", "2", "--copy-every", "4", "--copy-to", "memory", "--steps", "14"),
    )
    nodes = (
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", "127.0.0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "test"),
        "--rdzv-conf",
    )
    host, guest = "is_host=true,last_call_timeout=8", "is_host=false,last_call_timeout=8"
    with (
        torchrun(folders["second"], "second", *nodes, guest, more=more) as second,
        torchrun(folders["first"], "first", *nodes, host, more=more) as first,
    ):
        wait_for(trained(shared, 0, 5), first)
        for name in ("first", "second"):
            wait_for(copied(shared, 4, str(folders[name] / "memory")), first)
        kill_all(folders["second"], "second", second)
        shutil.rmtree(folders["second"])
        hold_at(seen, 1000)
        wait_for(lambda: b"ended" in part(shared, 0) or bool(part(shared, 1)), first)
        hold_at(seen, 5)
        wait_for(trained(shared, 1, 9), first)
        wait_for(copied(shared, 8, str(folders["first"] / "memory")), first)
        let_go(seen)
        with torchrun(folders["third"], "third", *nodes, guest, more=more) as third:
            ended(first)
            ended(third)
    record = read_record(shared / "record.json")
    assert [(one.world, one.first_step, one.last_step, one.where) for one in record.parts] == [
        (2, 1, 5, ""),
        (1, 5, 9, "copies"),
        (2, 9, 14, "copies"),
    ]
    require_plain_order(shared, record.parts)
    assert len(record.loss) == 14
    assert zerokit.list_steps(shared / "run") == [14]
    for name in ("first", "third"):
        assert list((folders[name] / "memory").iterdir()) == []
    done = record.checkpoints.copies
    assert done is not None
    assert (done.step, done.count, len(done.node_bytes)) == (12, 1, 2)


def part(folder: Path, number: int) -> bytes:
    """What the file of a part holds; nothing where there is none."""
    try:
        return (folder / "run" / "elastic" / f"part-{number:04d}.jsonl").read_bytes()
    except FileNotFoundError:
        return b""
