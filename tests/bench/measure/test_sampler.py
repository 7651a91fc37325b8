"""System metrics: what the kernel's files say, and a thread that stops when asked to."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from zerokit.bench.measure import sampler
from zerokit.bench.measure.sampler import Sampler, parse_memory, parse_network, parse_stat
from zerokit.bench.record import Samples
from zerokit.bench.record.schema import from_plain, to_plain

# user nice system idle iowait irq softirq steal guest guest_nice
STAT = "cpu  100 5 50 800 40 1 2 2 70 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
MEMORY = (
    "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\nHugePages_Total:       0\n"
)
NETWORK = (
    "Inter-|   Receive                                                |  Transmit\n"
    " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls\n"
    "    lo: 1000 10 0 0 0 0 0 0 1000 10 0 0 0 0 0 0\n"
    "  eth0:5000 10 0 0 0 0 0 0 700 10 0 0 0 0 0 0\n"
)


def test_waiting_for_a_disk_is_not_busy_and_guests_count_once() -> None:
    assert parse_stat(STAT) == (160, 1000)


def test_memory_that_the_kernel_would_give_back_is_not_used() -> None:
    assert parse_memory(MEMORY) == (600 * 1024, 1000 * 1024)


def test_every_interface_counts() -> None:
    assert parse_network(NETWORK) == (6000, 1700)


def write(proc: Path, *, busy: int, idle: int, received: int) -> None:
    (proc / "net").mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu {busy} 0 0 {idle} 0 0 0 0 0 0\n")
    (proc / "meminfo").write_text(MEMORY)
    (proc / "net/dev").write_text(NETWORK.replace("5000", str(received)))


def wait_for_readings(one: Sampler, count: int) -> None:
    deadline = time.monotonic() + 20.0
    while len(one._rows) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_shares_are_of_the_time_between_readings_and_bytes_since_the_first(tmp_path: Path) -> None:
    write(tmp_path, busy=100, idle=100, received=5000)
    one = Sampler(interval_s=3600.0, proc=tmp_path)
    one.start()
    wait_for_readings(one, 1)
    write(tmp_path, busy=130, idle=110, received=2_005_000)
    samples = one.stop()
    assert samples.series["cpu_utilization_percentage"] == [None, 75.0]
    assert samples.series["network_receive_megabytes"] == [0.0, 2.0]
    assert samples.series["network_transmit_megabytes"] == [0.0, 0.0]
    assert samples.series["system_memory_usage_percentage"] == [60.0, 60.0]
    assert len(samples.seconds) == 2


def test_what_cannot_be_read_is_left_out_and_what_comes_later_is_null_before(tmp_path: Path) -> None:
    one = Sampler(interval_s=3600.0, proc=tmp_path)
    one.start()
    wait_for_readings(one, 1)
    (tmp_path / "meminfo").write_text(MEMORY)
    samples = one.stop()
    assert samples.series["system_memory_usage_percentage"] == [None, 60.0]
    assert "cpu_utilization_percentage" not in samples.series


def test_it_reads_at_its_interval_and_once_more_at_the_end() -> None:
    one = Sampler(interval_s=0.01)
    one.start()
    wait_for_readings(one, 4)
    samples = one.stop()
    assert len(samples.seconds) >= 5
    assert samples.seconds == sorted(samples.seconds)
    assert all(len(values) == len(samples.seconds) for values in samples.series.values())
    assert samples.cost_ms > 0.0
    assert not [thread for thread in threading.enumerate() if thread.name == "zerokit-sampler"]
    assert samples.node == 0
    # As part of a record it survives the way through JSON.
    assert from_plain(Samples, json.loads(json.dumps(to_plain(samples)))) == samples


def test_a_long_run_is_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_READINGS", 8)
    one = Sampler(interval_s=0.001)
    one.start()
    deadline = time.monotonic() + 20.0
    while one._interval_s < 0.004:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    samples = one.stop()
    assert len(samples.seconds) <= 8
    assert samples.interval_s >= 0.004
    assert samples.seconds == sorted(samples.seconds)


def test_the_disk_is_the_one_that_shutil_sees() -> None:
    one = Sampler(interval_s=3600.0)
    one.start()
    total = shutil.disk_usage("/").total
    samples = one.stop()
    used = samples.series["disk_usage_percentage"][0]
    assert used is not None
    megabytes = samples.series["disk_usage_megabytes"][0]
    assert megabytes is not None
    assert megabytes * 1e6 / total * 100.0 == pytest.approx(used)
