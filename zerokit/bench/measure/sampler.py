"""System metrics of one node while the measured steps run: a thread takes a reading once per second.

Metrics are named as MLflow names its own, so that they appear among its system metrics. What a machine does not
have is left out; what one reading lacks is null.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zerokit.bench.record.measured import Samples

INTERVAL_S = 1.0
_MEGABYTE = 1e6
_READINGS = 4096
"""Where there would be more, every second one is dropped and the interval doubled: a record stays a small file."""
Figures = Iterable[tuple[str, float | None]]


def _host() -> Callable[[], Figures]:
    """Reads processors, network, memory and disk; shares need two readings, and bytes count from the first.

    Loopback counts: simulated nodes talk over it, as do the ranks of one node. Waiting for a disk is not busy, and
    reclaimable memory is not used.
    """
    import psutil

    first, seen = psutil.net_io_counters(), False
    psutil.cpu_percent()

    def read() -> Figures:
        nonlocal seen
        yield "cpu_utilization_percentage", psutil.cpu_percent() if seen else None
        seen = True
        network = psutil.net_io_counters()
        yield "network_receive_megabytes", (network.bytes_recv - first.bytes_recv) / _MEGABYTE
        yield "network_transmit_megabytes", (network.bytes_sent - first.bytes_sent) / _MEGABYTE
        memory = psutil.virtual_memory()
        used = memory.total - memory.available
        yield "system_memory_usage_megabytes", used / _MEGABYTE
        yield "system_memory_usage_percentage", 100.0 * used / memory.total
        disk = psutil.disk_usage("/")
        yield "disk_usage_percentage", 100.0 * disk.used / disk.total
        yield "disk_usage_megabytes", disk.used / _MEGABYTE
        yield "disk_available_megabytes", disk.free / _MEGABYTE

    return read


def _devices(identities: Sequence[str]) -> Callable[[], Figures]:
    """Reads utilisation, memory and power of devices by NVIDIA's management library; `gpu_0` is the first of these.

    What the library does not know is left out, and a driver or `pip install nvidia-ml-py` may be missing.
    """
    import pynvml as nvml

    nvml.nvmlInit()
    handles: list[tuple[str, Any]] = []
    for number, identity in enumerate(identities):
        # Torch does not say which kind its UUID is of.
        for name in dict.fromkeys((identity, identity.replace("GPU-", "MIG-", 1))):
            with contextlib.suppress(nvml.NVMLError):
                handles.append((f"gpu_{number}", nvml.nvmlDeviceGetHandleByUUID(name)))
                break

    def read() -> Figures:
        for name, handle in handles:  # not every device has every figure
            with contextlib.suppress(nvml.NVMLError):
                yield f"{name}_utilization_percentage", float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            with contextlib.suppress(nvml.NVMLError):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                yield f"{name}_memory_usage_megabytes", memory.used / _MEGABYTE
                yield f"{name}_memory_usage_percentage", 100.0 * memory.used / memory.total
            with contextlib.suppress(nvml.NVMLError):
                yield f"{name}_power_usage_watts", nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0

    return read


class Sampler:
    """Samples this node's system metrics from `start` to `stop`, every `interval_s`.

    `devices` are those to sample, by their identities; others on the machine are not ours.
    """

    def __init__(self, interval_s: float = INTERVAL_S, devices: Sequence[str] = ()) -> None:
        self._interval_s = interval_s
        self.devices = tuple(devices)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zerokit-sampler", daemon=True)
        self._started = self._cost_s = 0.0
        self._seconds: list[float] = []
        self._rows: list[dict[str, float | None]] = []

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
        readers: list[Callable[[], Figures]] = []
        with contextlib.suppress(Exception):  # a machine may lack the kernel's files, or the package
            readers.append(_host())
        if self.devices:
            with contextlib.suppress(Exception):  # or the driver
                readers.append(_devices(self.devices))
        due = self._started
        while True:
            row: dict[str, float | None] = {}
            self._seconds.append(time.monotonic() - self._started)
            for read in readers:
                with contextlib.suppress(Exception):  # what failed now may come later
                    for name, value in read():
                        row[name] = value
            self._rows.append(row)
            if len(self._rows) >= _READINGS:
                self._seconds, self._rows = self._seconds[::2], self._rows[::2]
                self._interval_s *= 2
            self._cost_s = time.thread_time()
            if self._ended.is_set():
                return
            due += self._interval_s
            # At the end one more reading is taken, so that the last part of an interval is not lost.
            self._ended.wait(max(0.0, due - time.monotonic()))
