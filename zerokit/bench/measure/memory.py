"""Memory of a CUDA device: torch's peaks before and during the measured steps, and what the whole device has used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerokit.bench.record import DeviceMemory


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that torch's allocator has handed out, and has taken from the device, since the last reset."""

    allocated_bytes: int
    reserved_bytes: int


class MemoryMeter:
    """Tells the peak of the measured steps from that of what came before.

    Args:
        device: a CUDA device.
        cuda: `torch.cuda`.
    """

    def __init__(self, device: Any, cuda: Any) -> None:
        self._device = device
        self._cuda = cuda
        self._setup = Peaks(0, 0)

    def peaks(self) -> Peaks:
        """Since `begin`, or the start of the process."""
        return Peaks(
            self._cuda.max_memory_allocated(self._device), self._cuda.max_memory_reserved(self._device)
        )

    def begin(self) -> None:
        """The measured steps begin: their peaks start from what is held now."""
        self._setup = self.peaks()
        self._cuda.reset_peak_memory_stats(self._device)

    def account(self, batch_bytes: int) -> DeviceMemory:
        """To be asked right after the measured steps."""
        free, total = self._cuda.mem_get_info(self._device)
        return DeviceMemory(
            self._setup.allocated_bytes, self._setup.reserved_bytes, batch_bytes, total - free, total
        )
