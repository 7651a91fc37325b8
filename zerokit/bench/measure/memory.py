"""Memory of a CUDA device: torch's peaks before and during the measured steps, and the whole device's use."""

from __future__ import annotations

from typing import Any

from zerokit.bench.record import DeviceMemory


class MemoryMeter:
    """Separates the peak of the measured steps from the earlier peak.

    Args:
        device: a CUDA device.
        cuda: `torch.cuda`.
    """

    def __init__(self, device: Any, cuda: Any) -> None:
        self._device = device
        self._cuda = cuda
        self._setup = (0, 0)

    def peaks(self) -> tuple[int, int]:
        """Peak bytes that torch has allocated and reserved since `begin` or the start of the process."""
        cuda, device = self._cuda, self._device
        return cuda.max_memory_allocated(device), cuda.max_memory_reserved(device)

    def begin(self) -> None:
        """Reset the peaks at the start of the measured steps."""
        self._setup = self.peaks()
        self._cuda.reset_peak_memory_stats(self._device)

    def account(self, batch_bytes: int) -> DeviceMemory:
        """The record's entry for the device, taken right after the measured steps."""
        free, total = self._cuda.mem_get_info(self._device)
        return DeviceMemory(*self._setup, batch_bytes, total - free, total)
