"""Two clocks: one looks at every step, the other waits for the device once."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from tests.bench.clocks import Device
from zerokit.bench.measure.clock import Clock


def test_a_device_is_waited_for_before_the_first_step_and_after_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows add up, and what is between them does not count."""
    device = Device()
    wall = SimpleNamespace(perf_counter=lambda: device.over_ms / 1000.0)
    monkeypatch.setattr("zerokit.bench.measure.clock.time", wall)
    clock = device.clock()
    assert clock.read() == []
    device.work(1000.0)  # of before
    for window in range(1, 3):
        for step in range(4):
            clock.begin()
            device.log.append("step")
            device.work(10.0 + step)
            clock.end()
        assert clock.read() == [10.0, 11.0, 12.0, 13.0]
        assert clock.window_ms == pytest.approx(46.0 * window)
        assert device.log == ["synchronize", "record", *["step", "record"] * 4, "synchronize"] * window
        device.work(400.0)  # a checkpoint


def test_the_hosts_clock_times_each_step_alone() -> None:
    clock = Clock()
    for _ in range(2):
        started = time.perf_counter()
        clock.begin()
        time.sleep(0.01)
        clock.end()
        time.sleep(0.2)  # the next batch is made
        (step,) = clock.read()
        assert 10.0 <= step <= (time.perf_counter() - started) * 1000.0 - 200.0
    assert clock.window_ms is None
    assert clock.read() == []
