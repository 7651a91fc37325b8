"""Peaks of a made-up allocator: construction's apart from the measured steps'."""

from __future__ import annotations

from dataclasses import dataclass, field

from zerokit.bench.measure.memory import MemoryMeter
from zerokit.bench.record.measured import DeviceMemory


@dataclass
class Cuda:
    """`torch.cuda` of one device of 1000 bytes, which reserves in hundreds and of which others hold 150."""

    held: int = 0
    reserved: int = 0
    peak: int = 0
    reserved_peak: int = 0
    resets: list[str] = field(default_factory=list)

    def hold(self, size: int) -> None:
        self.held = size
        self.reserved = max(self.reserved, -(-size // 100) * 100)
        self.peak, self.reserved_peak = max(self.peak, size), max(self.reserved_peak, self.reserved)

    def max_memory_allocated(self, device: str) -> int:
        assert device == "one"
        return self.peak

    def max_memory_reserved(self, device: str) -> int:
        return self.reserved_peak

    def reset_peak_memory_stats(self, device: str) -> None:
        self.resets.append(device)
        self.peak, self.reserved_peak = self.held, self.reserved

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return 1000 - 150 - self.reserved, 1000


def test_the_peak_of_construction_is_not_that_of_the_steps() -> None:
    cuda = Cuda()
    meter = MemoryMeter("one", cuda)
    cuda.hold(650)
    cuda.hold(200)
    meter.begin()
    assert cuda.resets == ["one"]
    assert meter.peaks() == (200, 700)  # what was reserved stays so
    cuda.hold(420)
    cuda.hold(300)
    assert meter.peaks() == (420, 700)
    assert meter.account(batch_bytes=30) == DeviceMemory(650, 700, 30, 850, 1000)
