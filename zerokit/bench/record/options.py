"""What an option of a bench is: its help, check, and words in tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

TRAINED = "What is trained (comma lists make a sweep)"
MANNER = "How it is trained"
MEASURED = "How it is measured"
CHECKPOINTS = "Checkpoints"

STAGES = (0, 1, 2, 3)
ON_DEVICE = "device"
DEFAULT_REPEATS = 3
"""Rounds of a sweep where nobody chooses."""
LOSSY_WIRES = ("int8", "int4", "powersgd")
"""Gradients that arrive on these are not the sum of the ranks' gradients, rounded."""
STEPS_A_ROUND = 12
"""Measured steps where nobody chooses and there are several rounds."""


@dataclass(frozen=True, slots=True)
class Option:
    """The option of a field of `Settings`: its help, check and display.

    Attributes:
        sweep: whether it may have several values, which make a sweep. "outer" options change last: the engines and
            stages of one workload run after each other, so that a machine that changes its pace in the course of an
            hour spoils no comparison between them.
        choices: all values, where there are few.
        minimum, above: the smallest value, or a number that it must exceed.
        metavar: its value in the help; by default N for whole numbers, X for others, NAME for choices.
        shown_default: in the help, where it is not `Settings`' own.
        title: in lists; by default its name.
        words: a value in a label, such as "batch {}"; by default the title and the value.
        same_cell: whether records that differ in it alone are repetitions of one cell.
    """

    help: str
    heading: str
    sweep: Literal["", "outer", "inner"] = ""
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    above: float | None = None
    metavar: str | None = None
    shown_default: str | None = None
    title: str | None = None
    words: str | None = None
    same_cell: bool = False


def option(default: Any, help: str, heading: str, **more: Any) -> Any:
    """A field of `Settings` with its `Option`."""
    return field(default=default, metadata={"option": Option(help, heading, **more)})


outer = partial(option, heading=TRAINED, sweep="outer")
inner = partial(option, heading=TRAINED, sweep="inner")
fixed = partial(option, heading=MANNER)
timed = partial(option, heading=MEASURED, same_cell=True)
saved = partial(option, heading=CHECKPOINTS, same_cell=True)
