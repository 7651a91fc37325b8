"""Offsets of clocks that machines' processes share."""

from __future__ import annotations

from zerokit.offsets import Offset, by_machine


def test_ranks_of_one_machine_read_one_clock() -> None:
    measured = [Offset(0.001, 0.002), Offset(-0.004, 0.005), Offset(70.1, 0.3), Offset(70.0, 0.1)]
    assert by_machine(measured, ["a", "a", "b", "b"]) == [
        Offset(0.0, 0.0),
        Offset(0.0, 0.0),
        Offset(70.0, 0.1),  # the less uncertain one
        Offset(70.0, 0.1),
    ]


def test_a_clock_that_contradicts_its_machines_is_one_of_its_own() -> None:
    """A time namespace, or machines that nothing distinguishes."""
    measured = [Offset(0.0, 0.002), Offset(3600.0, 0.004), Offset(0.001, 0.002)]
    assert by_machine(measured, ["a", "a", "a"]) == [
        Offset(0.0, 0.0),
        Offset(3600.0, 0.004),
        Offset(0.0, 0.0),
    ]
