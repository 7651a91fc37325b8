"""Signals are remembered, then insisted on; handlers come back."""

from __future__ import annotations

import os
import signal

import pytest

from zerokit.interrupts import Interrupted, Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_waits_to_be_looked_at_and_the_second_does_not(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        interrupts.check()
        os.kill(os.getpid(), number)
        with pytest.raises(Interrupted, match=f"interrupted by {number.name}") as caught:
            interrupts.check()
        assert caught.value.signal_number == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            interrupts.check()
    finally:
        signal.signal(signal.SIGHUP, before)
