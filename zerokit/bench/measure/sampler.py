"""System metrics of one node while the measured steps run: a thread reads a few small files once per second.

Metrics are named as MLflow names its own, so that they appear among its system metrics. What a machine does not
have is left out; what one reading lacks is null.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from zerokit.bench.machine.nvml import Devices
from zerokit.bench.record.measured import Samples

INTERVAL_S = 1.0
_MEGABYTE = 1e6
_READINGS = 4096
"""Where there would be more, every second one is dropped and the interval doubled: a record stays a small file."""
Row = dict[str, float | None]


def parse_stat(text: str) -> tuple[int, int]:
    """Busy and total ticks of all processors, from /proc/stat. Waiting for a disk is not busy."""
    ticks = [int(word) for word in text.splitlines()[0].split()[1:9]]  # guests are part of user already
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def parse_memory(text: str) -> tuple[int, int]:
    """Used and total bytes of main memory, from /proc/meminfo; reclaimable memory is not used."""
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    total, available = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total - available, total


def parse_network(text: str) -> tuple[int, int]:
    """Received and sent bytes, from /proc/net/dev.

    Loopback counts: simulated nodes talk over it, as do the ranks of one node.
    """
    received = sent = 0
    for line in text.splitlines()[2:]:
        fields = line.split(":", 1)[1].split()
        received, sent = received + int(fields[0]), sent + int(fields[8])
    return received, sent


class Sampler:
    """Samples this node's system metrics from `start` to `stop`.

    Args:
        interval_s: between two readings.
        proc: where the kernel's files are.
        devices: those to sample, by their identities (`devices.identify`); others on the machine are not ours.
    """

    def __init__(
        self, interval_s: float = INTERVAL_S, proc: Path = Path("/proc"), devices: Sequence[str] = ()
    ) -> None:
        self._interval_s = interval_s
        self._proc = proc
        self.devices = tuple(devices)
        self._nvml: Devices | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerokit-sampler", daemon=True)
        self._started = self._cost_s = 0.0
        self._seconds: list[float] = []
        self._rows: list[Row] = []
        self._ticks: tuple[int, int] | None = None
        self._first_bytes: tuple[int, int] | None = None

    def start(self) -> None:
        """Take the first reading and start the thread; returns at once."""
        self._started = time.monotonic()
        self._thread.start()

    def stop(self) -> Samples:
        """Take the last reading and wait for the thread."""
        self._ended.set()
        self._thread.join()
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        return Samples(
            node=int(os.environ.get("GROUP_RANK", "0")),
            host=socket.gethostname(),
            interval_s=self._interval_s,
            seconds=self._seconds,
            series={name: [row.get(name) for row in self._rows] for name in names},
            cost_ms=self._cost_s * 1000.0,
        )

    def _run(self) -> None:
        self._nvml = Devices.find(self.devices)
        due = self._started
        while True:
            self._seconds.append(time.monotonic() - self._started)
            self._rows.append(self._read())
            if len(self._rows) >= _READINGS:
                self._seconds, self._rows = self._seconds[::2], self._rows[::2]
                self._interval_s *= 2
            self._cost_s = time.thread_time()
            if self._ended.is_set():
                return
            due += self._interval_s
            # At the end one more reading is taken, so that the last part of an interval is not lost.
            self._ended.wait(max(0.0, due - time.monotonic()))

    def _read(self) -> Row:
        row: Row = {}
        parts: tuple[Callable[[Row], None], ...] = (self._processor, self._network, self._memory, self._disk)
        for part in parts:
            # Not every machine has all of the files.
            with contextlib.suppress(OSError, ValueError, LookupError):
                part(row)
        if self._nvml is not None:
            self._nvml.read(row)
        return row

    def _processor(self, row: Row) -> None:
        before, self._ticks = self._ticks, parse_stat((self._proc / "stat").read_text())
        # A share needs two readings, and time between them.
        busy, passed = (0, 0)
        if before is not None:
            busy, passed = (now - then for now, then in zip(self._ticks, before, strict=True))
        row["cpu_utilization_percentage"] = 100.0 * busy / passed if passed > 0 else None

    def _network(self, row: Row) -> None:
        received, sent = parse_network((self._proc / "net/dev").read_text())
        first = self._first_bytes = self._first_bytes or (received, sent)
        row["network_receive_megabytes"] = (received - first[0]) / _MEGABYTE
        row["network_transmit_megabytes"] = (sent - first[1]) / _MEGABYTE

    def _memory(self, row: Row) -> None:
        used, total = parse_memory((self._proc / "meminfo").read_text())
        row["system_memory_usage_megabytes"] = used / _MEGABYTE
        row["system_memory_usage_percentage"] = 100.0 * used / total

    def _disk(self, row: Row) -> None:
        disk = shutil.disk_usage("/")
        row["disk_usage_percentage"] = 100.0 * disk.used / disk.total
        row["disk_usage_megabytes"] = disk.used / _MEGABYTE
        row["disk_available_megabytes"] = disk.free / _MEGABYTE
