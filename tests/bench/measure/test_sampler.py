"""System metrics: what the kernel's files say, and a thread that stops when asked to."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zerokit.bench.measure import sampler
from zerokit.bench.measure.sampler import Sampler
from zerokit.bench.record.measured import Samples
from zerokit.bench.record.schema import from_plain, to_plain

MEMORY = "MemTotal:     1000 kB\nMemFree:       100 kB\nMemAvailable:  400 kB\nHugePages_Total:     0\n"
NETWORK = (
    "Inter-|   Receive  |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes\n"
)


def write(proc: Path, *, busy: int, idle: int, received: int) -> None:
    """As the kernel does; a guest's time is in the user's, and a rank that waits for a disk is not busy."""
    (proc / "net").mkdir(exist_ok=True)
    # user nice system idle iowait irq softirq steal guest guest_nice
    (proc / "stat").write_text(f"cpu  {busy - 60} 5 50 {idle - 40} 40 1 2 2 70 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    (proc / "meminfo").write_text(MEMORY)
    cards = {"    lo:": 1000, "  eth0:": received}
    lines = [f"{name}{size} 10 0 0 0 0 0 0 700 10 0 0 0 0 0 0\n" for name, size in cards.items()]
    (proc / "net/dev").write_text(NETWORK + "".join(lines))


def started(interval_s: float, until: Callable[[Sampler], bool], proc: Path = Path("/proc")) -> Sampler:
    """A sampler that has come so far."""
    one = Sampler(interval_s=interval_s, proc=proc)
    one.start()
    while not until(one):
        time.sleep(0.001)
    return one


def test_shares_are_of_the_time_between_readings_and_bytes_since_the_first(tmp_path: Path) -> None:
    write(tmp_path, busy=100, idle=100, received=5000)
    one = started(3600.0, lambda one: len(one._rows) == 1, tmp_path)
    write(tmp_path, busy=130, idle=110, received=2_005_000)
    samples = one.stop()
    assert samples.series["cpu_utilization_percentage"] == [None, 75.0]
    assert samples.series["network_receive_megabytes"] == [0.0, 2.0]
    assert samples.series["network_transmit_megabytes"] == [0.0, 0.0]
    # What the kernel would give back is not used.
    assert samples.series["system_memory_usage_percentage"] == [60.0, 60.0]
    assert len(samples.seconds) == 2


def test_what_cannot_be_read_is_left_out_and_what_comes_later_is_null_before(tmp_path: Path) -> None:
    one = started(3600.0, lambda one: len(one._rows) == 1, tmp_path)
    (tmp_path / "meminfo").write_text(MEMORY)
    samples = one.stop()
    assert samples.series["system_memory_usage_percentage"] == [None, 60.0]
    assert "cpu_utilization_percentage" not in samples.series


def test_it_reads_at_its_interval_and_once_more_at_the_end() -> None:
    samples = started(0.01, lambda one: len(one._rows) >= 4).stop()
    assert len(samples.seconds) >= 5
    assert samples.seconds == sorted(samples.seconds)
    assert all(len(values) == len(samples.seconds) for values in samples.series.values())
    assert samples.cost_ms > 0.0
    assert not [thread for thread in threading.enumerate() if thread.name == "zerokit-sampler"]
    used, megabytes = (samples.series[f"disk_usage_{unit}"][0] for unit in ("percentage", "megabytes"))
    assert used is not None
    assert megabytes is not None
    assert megabytes * 1e6 / shutil.disk_usage("/").total * 100.0 == pytest.approx(used)
    # As part of a record it survives the way through JSON.
    assert from_plain(Samples, json.loads(json.dumps(to_plain(samples)))) == samples


def test_a_long_run_is_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_READINGS", 8)
    samples = started(0.001, lambda one: one._interval_s >= 0.004).stop()
    assert len(samples.seconds) <= 8
    assert samples.interval_s >= 0.004
    assert samples.seconds == sorted(samples.seconds)
    assert {len(values) for values in samples.series.values()} == {len(samples.seconds)}
