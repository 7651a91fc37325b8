"""A made-up CUDA device: its events tell a time of its own, and everything is noted in order."""

from __future__ import annotations

from dataclasses import dataclass, field

from zerokit.bench.measure.clock import DeviceClock


@dataclass
class Device:
    """A queue: `work` takes time on it, which passes only when somebody waits for it."""

    log: list[str] = field(default_factory=list)
    asked_ms: float = 0.0
    over_ms: float = 0.0

    def work(self, ms: float) -> None:
        """Something to do."""
        self.asked_ms += ms

    def synchronize(self) -> None:
        """Wait for all of it."""
        self.log.append("synchronize")
        self.over_ms = self.asked_ms

    def clock(self) -> DeviceClock:
        """One that times this device."""
        return DeviceClock(lambda: Event(self), self.synchronize)


@dataclass
class Event:
    """As torch's: it can be asked only once it is over."""

    device: Device
    at_ms: float | None = None

    def record(self) -> None:
        """Behind what was asked for so far."""
        assert self.at_ms is None, "recorded twice"
        self.device.log.append("record")
        self.at_ms = self.device.asked_ms

    def elapsed_time(self, end_event: Event, /) -> float:
        """To a later event."""
        assert self.at_ms is not None
        assert end_event.at_ms is not None
        assert end_event.at_ms <= self.device.over_ms, "it is not over yet"
        return end_event.at_ms - self.at_ms
