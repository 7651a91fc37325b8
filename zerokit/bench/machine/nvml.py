"""Utilisation, memory and power of the devices that a node's ranks use, from NVIDIA's management library."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

_MEGABYTE = 1e6


class Devices:
    """Devices by their identities (`devices.identify`); `gpu_0` is the first of them, not of the machine.

    Args:
        library: `pynvml`, initialised.
        identities: UUIDs ("GPU-…", or "MIG-…" for a slice), or the driver's index of a device in digits. What the
            library does not know is left out.
    """

    def __init__(self, library: Any, identities: Sequence[str]) -> None:
        self._library = library
        self._handles: list[tuple[int, Any]] = []
        for number, identity in enumerate(identities):
            with contextlib.suppress(library.NVMLError):
                self._handles.append((number, self._handle(identity)))

    @classmethod
    def find(cls, identities: Sequence[str]) -> Devices | None:
        """A reader of these devices; None without identities, a driver, or `pip install nvidia-ml-py`."""
        if not identities:
            return None
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            return cls(pynvml, identities)
        except pynvml.NVMLError:
            return None

    def _handle(self, identity: str) -> Any:
        if identity.isdecimal():
            return self._library.nvmlDeviceGetHandleByIndex(int(identity))
        try:
            return self._library.nvmlDeviceGetHandleByUUID(identity)
        except self._library.NVMLError:  # torch does not say which kind its UUID is of
            return self._library.nvmlDeviceGetHandleByUUID(identity.replace("GPU-", "MIG-", 1))

    def read(self, row: dict[str, float | None]) -> None:
        """Add the current figures to `row`."""
        nvml = self._library
        for number, handle in self._handles:
            # Not every device has every figure.
            with contextlib.suppress(nvml.NVMLError):
                used = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                row[f"gpu_{number}_utilization_percentage"] = used
            with contextlib.suppress(nvml.NVMLError):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                row[f"gpu_{number}_memory_usage_megabytes"] = memory.used / _MEGABYTE
                row[f"gpu_{number}_memory_usage_percentage"] = 100.0 * memory.used / memory.total
            with contextlib.suppress(nvml.NVMLError):
                row[f"gpu_{number}_power_usage_watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000.0
