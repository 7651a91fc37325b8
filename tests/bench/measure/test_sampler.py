"""System metrics while steps run, and what the record says of machine and software."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerokit.bench.measure.environment import git_commit, measured_variables
from zerokit.bench.measure.sampler import Sampler
from zerokit.bench.record.measured import Samples
from zerokit.bench.record.schema import from_plain, to_plain


class Psutil:
    """psutil, made up: a reading later, three quarters of the processors' time were busy."""

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        self.broken = broken
        self.received = 5000

    def __getattr__(self, name: str) -> object:
        figures = {
            "cpu_percent": 75.0,
            "net_io_counters": SimpleNamespace(bytes_recv=self.received, bytes_sent=7),
            "virtual_memory": SimpleNamespace(total=1000, available=400),
            "disk_usage": shutil.disk_usage("/"),
        }
        if name in self.broken:
            raise OSError(name)
        return lambda *_: figures[name]


def started(interval_s: float, until: Callable[[Sampler], bool]) -> Sampler:
    """A sampler that has come so far."""
    one = Sampler(interval_s=interval_s)
    one.start()
    while not until(one):
        time.sleep(0.001)
    return one


def test_shares_are_of_the_time_between_readings_and_bytes_since_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Psutil()
    monkeypatch.setitem(sys.modules, "psutil", library)
    one = started(3600.0, lambda one: len(one._rows) == 1 and len(one._rows[0]) == 8)
    library.received = 2_005_000
    samples = one.stop()
    assert samples.series["cpu_utilization_percentage"] == [None, 75.0]
    assert samples.series["network_receive_megabytes"] == [0.0, 2.0]
    assert samples.series["network_transmit_megabytes"] == [0.0, 0.0]
    # What the kernel would give back is not used.
    assert samples.series["system_memory_usage_percentage"] == [60.0, 60.0]
    assert len(samples.seconds) == 2


def test_what_cannot_be_read_is_left_out_and_what_comes_later_is_null_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Psutil(broken=("virtual_memory",))
    monkeypatch.setitem(sys.modules, "psutil", library)
    one = started(3600.0, lambda one: len(one._rows) == 1 and len(one._rows[0]) == 3)
    library.broken = ()
    samples = one.stop()
    assert samples.series["system_memory_usage_percentage"] == [None, 60.0]
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert started(3600.0, lambda one: len(one._rows) == 1).stop().series == {}


def test_it_reads_at_its_interval_and_once_more_at_the_end() -> None:
    samples = started(0.01, lambda one: len(one._rows) >= 4).stop()
    assert len(samples.seconds) >= 5
    assert samples.seconds == sorted(samples.seconds)
    assert all(len(values) == len(samples.seconds) for values in samples.series.values())
    assert samples.cost_ms > 0.0
    # As part of a record it survives the way through JSON.
    assert from_plain(Samples, json.loads(json.dumps(to_plain(samples)))) == samples


def test_a_long_run_is_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerokit.bench.measure.sampler._READINGS", 8)
    samples = started(0.001, lambda one: one._interval_s >= 0.004).stop()
    assert (len(samples.seconds) <= 8, samples.interval_s >= 0.004) == (True, True)
    assert samples.seconds == sorted(samples.seconds)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_commit_of_a_repository_and_whether_it_was_changed(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is git_commit(tmp_path / "missing") is None
    git(tmp_path, "init", "--quiet")
    assert git_commit(tmp_path) is None  # nothing is committed yet
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "record.json").write_text("not tracked: no change")
    assert git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert git_commit(tmp_path / ".") == f"{commit}-dirty"


def test_only_variables_that_change_measurements_are_kept_without_their_secrets() -> None:
    kept = {"GLOO_SOCKET_IFNAME": "lo", "LD_PRELOAD": "libjemalloc.so", "MALLOC_ARENA_MAX": "2"}
    kept |= {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    kept |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    others = {"HOME": "/root", "AWS_SECRET_ACCESS_KEY": "x", "CUDA_HOME": "/usr/local/cuda", "PATH": "/bin"}
    secret = {"NCCL_HTTP_TOKEN": "hunter2", "NCCL_PROXY": "http://bob:hunter2@proxy:1"}
    hidden = {"NCCL_HTTP_TOKEN": "***", "NCCL_PROXY": "http://***@proxy:1"}
    assert measured_variables(kept | others | secret) == kept | hidden
