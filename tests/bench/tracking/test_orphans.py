"""A launcher that is killed with signal 9 leaves runs that say RUNNING; the next bench on its host ends them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.commands import environment
from zerokit.bench.record.settings import Settings
from zerokit.bench.tracking.content import Tag
from zerokit.bench.tracking.mirror import Live, Mirror
from zerokit.bench.tracking.store import Store, Tracking, TrackingError
from zerokit.process import Process

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

# MLflow and what it imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

SWEEP = "5" * 32
BENCH = f"""
import time
from zerokit.bench.record.settings import Settings
from zerokit.bench.tracking.mirror import Live
from zerokit.bench.tracking.store import Tracking

def work(identity):
    print("running", flush=True)
    time.sleep(600)

live = Live(Tracking("sqlite:///mlflow.db", "theirs"), print, "later", (KeyboardInterrupt,), lambda record: {{}})
live.open_sweep("{SWEEP}", "a sweep", {{}})
live.during(Settings(model="gpt-tiny", seq_len=16), "{SWEEP}", work)
"""


def connect(experiment: str = "ours") -> tuple[Live, list[str]]:
    """What every `zerokit bench` does first."""
    told: list[str] = []
    tracking = Tracking("sqlite:///mlflow.db", experiment)
    return Live(tracking, told.append, "later", (KeyboardInterrupt,), lambda record: {}), told


def tags(process: Process) -> dict[str, str]:
    return {Tag.LAUNCHER: str(process), Tag.HOST: process.host}


def runs_of(client: MlflowClient, experiment: str) -> list[Run]:
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return list(client.search_runs([found.experiment_id]))


def test_runs_of_a_killed_launcher_are_closed_and_no_others(place: Path, client: MlflowClient) -> None:
    bench = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", BENCH],
        cwd=place,
        env=environment(place),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert bench.stdout is not None
    try:
        assert bench.stdout.readline() == "running\n"
        store = Store.open(Tracking("sqlite:///mlflow.db", "ours"))
        here = Process.current()
        foreign = store.create("of another host", tags(replace(here, host="elsewhere", pid=1, start=1)))
        contained = store.create("of a container", tags(replace(here, space=1, start=1)))
        unknown = store.create("from before", {Tag.HOST: here.host})
        own = store.create("of this process", tags(here))
        assert connect()[1] == []
        assert [run.info.status for run in runs_of(client, "theirs")] == ["RUNNING"] * 2

        bench.kill()
        os.waitid(os.P_PID, bench.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked for its exit status yet
        live, told = connect()
    finally:
        bench.kill()
        bench.wait()
    assert not live.lost
    assert told == []
    theirs = runs_of(client, "theirs")
    assert len(theirs) == 2
    for run in theirs:
        assert run.info.status == "KILLED"
        assert run.data.tags[Tag.STATUS] == "killed"
        reason = f"its launcher, process {bench.pid} on {here.host}, was killed"
        assert run.data.tags["zerokit.reason"] == reason
    for run_id in (foreign, contained, unknown, own):
        assert client.get_run(run_id).info.status == "RUNNING"

    # Its sweep goes on in the same runs, which are then this process's.
    mirror = Mirror(Store.open(Tracking("sqlite:///mlflow.db", "theirs")))
    run_id = mirror.begin(Settings(model="gpt-tiny", seq_len=16), "1" * 32, SWEEP)
    assert {run.info.run_id for run in runs_of(client, "theirs")} >= {run_id}
    assert len(runs_of(client, "theirs")) == 2
    assert client.get_run(run_id).info.status == "RUNNING"
    assert client.get_run(run_id).data.tags[Tag.LAUNCHER] == str(here)
    assert mirror.close_orphans() == 0


def test_a_store_that_lets_nobody_close_runs_is_used_all_the_same(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: Store, tags: object) -> None:
        raise TrackingError("not yours")

    monkeypatch.setattr(Store, "running", refuse)
    live, told = connect()
    assert not live.lost
    assert told == ["runs of killed benches are still shown as RUNNING: not yours"]
