"""The parts of the check, the most telling first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A part: its function as "module:name", and the seconds that it may take and is expected to take on an H100."""

    name: str
    function: str
    limit_s: float
    expected_s: float


_HERE = "benchmarks.gpu_check"
NO_LIMIT_S = 6 * 3600.0
"""For all tests without a budget."""

PARTS = (
    Entry("env", f"{_HERE}.environment:environment", 20, 6),
    Entry("parity", f"{_HERE}.parity:parity", 60, 35),
    Entry("avg", f"{_HERE}.averages:averages", 20, 5),
    Entry("cells-a", f"{_HERE}.cells:cells_a", 75, 55),
    Entry("eighth", f"{_HERE}.eighth:eighth", 90, 60),
    Entry("late", f"{_HERE}.late:late", 60, 30),
    Entry("gloo2", f"{_HERE}.gloo2:gloo2", 40, 15),
    Entry("checkpoint", f"{_HERE}.checkpoints:checkpoints", 60, 30),
    Entry("cells-b", f"{_HERE}.cells:cells_b", 60, 45),
    Entry("host", f"{_HERE}.host_time:host", 40, 25),
    Entry("compile", f"{_HERE}.compiled:compile_blocks", 70, 45),
    Entry("csan", f"{_HERE}.sanitizer:sanitizer", 40, 20),
    Entry("rest", f"{_HERE}.rest:rest", NO_LIMIT_S, 40),
)
