"""Kills of what scripts/crash-rounds does not train itself: conversions, elastic benches, sweeps, and `zerokit push`.

A conversion is killed at random moments until one comes to its end: its output must be that of one nobody killed. An
elastic bench's launcher is killed in one of its phases: the same command must then bring the job to its end. A sweep
is killed at random moments and continued, a push made again: MLflow must then have each record once, all finished.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from mlflow import MlflowClient
from torch._C._distributed_c10d import FileStore

import zerokit
from zerokit.bench.tracking.push import Mirror, find_records, push
from zerokit.bench.tracking.store import Tracking
from zerokit.checkpoint.run import list_steps
from zerokit.checkpoint.staging import leftovers

STEPS, SAVE_EVERY = 6, 2
SWEEP = (
    *("--model", "linear", "--device", "cpu", "--batch-size", "2", "--steps", "4", "--warmup", "1"),
    *("--no-twin", "--stage", "0,2", "--nproc-per-node", "2", "--repeats", "1"),
)
PHASES = ("init", "first save", "save", "end", "mlflow")
BETWEEN = "between saves"
AT_MLFLOW_S = 4.0
"""About as long as a bench needs to fill MLflow and to end, once its record is there."""
WITHIN = {"init": 3.0, "first save": 0.004, "save": 0.004, "mlflow": AT_MLFLOW_S}
"""Seconds in which the kill comes after a phase has begun."""
PATIENCE_S = 300.0
"""For a bench to come to its phase, or its processes to end after a kill."""


class Findings(Protocol):
    """What rounds add to."""

    kills_of_all: int
    phases: dict[str, int]
    saves: int
    resumes: int
    lost_steps: int
    blocked_resumes: int
    damaged_steps: int
    left_behind: int
    unclear_ends: int
    notes: list[str]


def forked(work: Callable[[], object]) -> int:
    """The number of a process that does this and ends with 0, or with 1 where it raised."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        work()
        code = 0
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """Its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def play_conversions(report: Findings, folder: Path, *, rounds: int, seed: int) -> None:
    """Reshard one checkpoint again and again, killed up to three times before it may end."""
    source, reference = folder / "source", folder / "reference"
    if ended(forked(lambda: _write_source(source, folder / "store"))):
        raise RuntimeError("the source could not be written")
    draw, begun = random.Random(f"conversions {seed}"), time.monotonic()
    zerokit.reshard(source, 3, reference)
    took = time.monotonic() - begun
    expected = _contents(reference)
    for number in range(rounds):
        output = folder / f"out-{number}"
        for _ in range(draw.randint(1, 3)):
            pid = forked(lambda output=output: zerokit.reshard(source, 3, output))  # type: ignore[misc]
            time.sleep(draw.uniform(0.0, 1.5 * took))
            os.kill(pid, signal.SIGKILL)
            report.kills_of_all += ended(pid) == -signal.SIGKILL
            if output.exists():
                break
        if not output.exists():
            report.resumes += any(left.target == output.name for left in leftovers(folder))
            if ended(forked(lambda output=output: zerokit.reshard(source, 3, output))):  # type: ignore[misc]
                report.blocked_resumes += 1
                report.notes.append(f"conversion {number} did not come to its end after a kill")
                continue
        report.saves += 1
        if _contents(output) != expected:
            report.damaged_steps += 1
            report.notes.append(f"conversion {number} has other bytes than one that nobody killed")
        if left := [one.path.name for one in leftovers(folder)]:
            report.left_behind += len(left)
            report.notes.append(f"conversion {number} left {', '.join(left)}")


def _write_source(run: Path, store: Path) -> None:
    seconds = timedelta(seconds=60)
    dist.init_process_group("gloo", store=FileStore(str(store), 1), rank=0, world_size=1, timeout=seconds)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=1e-3)
    optimizer.backward(model(torch.ones(1, 512)).sum())
    optimizer.step()
    zerokit.save(run, optimizer, step=1)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def play_elastic(report: Findings, folder: Path, *, rounds: int, seed: int) -> None:
    """Kill the launcher of an elastic bench in each phase by turns, and give the same command again."""
    report.phases |= dict.fromkeys((*PHASES, BETWEEN), 0)
    draw = random.Random(f"elastic {seed}")
    for number in range(rounds):
        _play_bench(report, folder / f"bench-{number}", number, PHASES[number % len(PHASES)], draw)


def _play_bench(report: Findings, folder: Path, number: int, phase: str, draw: random.Random) -> None:
    folder.mkdir()
    run, store = folder / "run", f"sqlite:///{folder / 'mlflow.db'}"
    words = f"--elastic --model linear --device cpu --batch-size 2 --steps {STEPS} --warmup 1 --save run"
    words += (
        f" --save-every {SAVE_EVERY} --nproc-per-node 2 --no-twin --output record.json --tracking-uri {store}"
    )

    def start() -> subprocess.Popen[bytes]:
        return _bench(folder, folder / "log", *words.split())

    def note(text: str) -> None:
        report.notes.append(f"elastic {number}, killed in {phase}: {text}")

    process, deadline = start(), time.monotonic() + PATIENCE_S
    while process.poll() is None and _phase(folder) != phase and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(draw.uniform(0.0, WITHIN.get(phase, 0.05)))
    fell = _phase(folder)
    process.kill()
    code = process.wait()
    if code == -signal.SIGKILL:
        report.kills_of_all += 1
        report.phases[fell] += 1
    if not _gone(folder):
        report.unclear_ends += 1
        note("its processes did not end")
    committed = max(list_steps(run), default=0)
    if code == 0:
        return  # it was quicker than the kill
    if start().wait():
        report.blocked_resumes += 1
        note(f"the same command failed: {(folder / 'log').read_text(errors='replace')[-600:]}")
        return
    report.resumes += 1
    record = json.loads((folder / "record.json").read_text())
    report.saves += len(list_steps(run))
    if max(list_steps(run), default=0) < max(committed, STEPS) or len(record["loss"]) != STEPS:
        report.lost_steps += 1
        note(f"steps {list_steps(run)}, {len(record['loss'])} losses")
    if not zerokit.verify(run).intact:
        report.damaged_steps += 1
        note("the newest step is damaged")
    if left := [one.path.name for one in leftovers(run)]:
        report.left_behind += len(left)
        note(f"left {', '.join(left)}")
    _require_runs(report, f"elastic {number}, killed in {phase}", store, 1)


def play_sweeps(report: Findings, folder: Path, *, rounds: int, seed: int) -> None:
    """Kill sweeps of two cells up to twice each, and continue them."""
    draw, took = random.Random(f"sweeps {seed}"), 30.0
    for number in range(rounds):
        (place := folder / f"sweep-{number}").mkdir()
        store = f"sqlite:///{place / 'mlflow.db'}"
        output, log, begun = place / "sweep", place / "log", time.monotonic()
        started = False
        for wanted in range(draw.randint(1, 2), -1, -1):
            # A sweep that was killed before it wrote its plan has to be asked for again.
            again = (
                ("--continue", "sweep") if (output / "sweep.json").exists() else (*SWEEP, "--output", "sweep")
            )
            process = _bench(place, log, *again, "--tracking-uri", store)
            if wanted:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(draw.uniform(0.0, took))
                report.resumes += started
                started = True
                process.kill()
            killed = process.wait() == -signal.SIGKILL
            report.kills_of_all += killed
            if not _gone(place):
                report.unclear_ends += 1
                report.notes.append(f"sweep {number}: its processes did not end")
            if not killed and process.returncode:
                report.blocked_resumes += 1
                text = log.read_text(errors="replace")[-600:]
                report.notes.append(f"sweep {number} was not continued: {text}")
        if number == 0:
            took = (time.monotonic() - begun) / 2
        records = [json.loads(path.read_text()) for path in sorted((output / "cells").glob("*.json"))]
        report.saves += len(records)
        if [record["status"] for record in records] != ["ok"] * 2:
            report.lost_steps += 1
            report.notes.append(f"sweep {number} has records {[record['status'] for record in records]}")
        _require_runs(report, f"sweep {number}", store, 3)


def play_pushes(report: Findings, folder: Path, *, rounds: int, seed: int) -> None:
    """Push the records of one sweep again and again, killed up to three times before it may end."""
    draw, place = random.Random(f"push {seed}"), folder / "sweep"
    if _bench(folder, folder / "log", *SWEEP, "--output", "sweep", "--no-mlflow").wait():
        raise RuntimeError(f"no sweep to push: {(folder / 'log').read_text(errors='replace')[-600:]}")
    empty = folder / "empty.db"

    def push_to(store: Path) -> None:
        push(find_records([place]), Mirror(Tracking(f"sqlite:///{store}", "crashes")))

    if ended(forked(lambda: Mirror(Tracking(f"sqlite:///{empty}", "crashes")))):
        raise RuntimeError("MLflow's store could not be made")
    os.chdir(folder)  # where artifacts go
    begun = time.monotonic()
    push_to(folder / "first.db")
    took = time.monotonic() - begun
    for number in range(rounds):
        store = folder / f"store-{number}.db"
        if draw.random() < 0.8:  # otherwise kills fall into the making of its tables
            shutil.copy(empty, store)
        for _ in range(draw.randint(1, 3)):
            pid = forked(lambda store=store: push_to(store))  # type: ignore[misc]
            time.sleep(draw.uniform(0.0, took))
            os.kill(pid, signal.SIGKILL)
            report.kills_of_all += ended(pid) == -signal.SIGKILL
        begun = time.monotonic()
        failed = ended(forked(lambda store=store: push_to(store)))  # type: ignore[misc]
        took = (took + time.monotonic() - begun) / 2  # a machine with more at work takes longer
        if failed:
            report.blocked_resumes += 1
            report.notes.append(f"push {number} failed after a kill")
            continue
        report.saves += 1
        _require_runs(report, f"push {number}", f"sqlite:///{store}", 3)


def _bench(folder: Path, log: Path, *words: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        command = [str(Path(sys.executable).with_name("zerokit")), "bench", *words]
        return subprocess.Popen(command, cwd=folder, stdout=file, stderr=file)


def _require_runs(report: Findings, what: str, store: str, count: int) -> None:
    if (statuses := _statuses(store)) != ["FINISHED"] * count:
        report.left_behind += 1
        report.notes.append(f"{what}: MLflow has runs {statuses}")


def _phase(folder: Path) -> str:
    """What a bench is about at this moment, by what it has written."""
    run = folder / "run"
    steps = list_steps(run) if run.exists() else []
    if (folder / "record.json").exists():
        return "mlflow"
    if STEPS in steps:
        return "end"
    if any(path.name.startswith(".step-") for path in run.glob(".*")):
        return "save" if steps else "first save"
    return BETWEEN if steps else "init"


def _gone(folder: Path) -> bool:
    """Whether all processes that work in the folder have ended."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if not any(_works_in(path, folder) for path in Path("/proc").glob("[0-9]*")):
            return True
        time.sleep(0.1)
    return False


def _works_in(process: Path, folder: Path) -> bool:
    try:
        return Path(os.readlink(process / "cwd")) == folder
    except OSError:
        return False


def _statuses(store: str) -> list[str]:
    client = MlflowClient(store)
    experiments = [one.experiment_id for one in client.search_experiments()]
    return [run.info.status for run in client.search_runs(experiments)]
