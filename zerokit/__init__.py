"""zerokit: a compact ZeRO runtime on PyTorch, and checkpoints that any world size reads.

Importing this package loads nothing heavy: each name below is resolved when it is first used, so that the
offline commands start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from zerokit.workers import guard_workers

if TYPE_CHECKING:
    from zerokit.bench.plans.ask import plan
    from zerokit.checkpoint.check import check_run
    from zerokit.checkpoint.diff import diff
    from zerokit.checkpoint.formats.convert import consolidate, convert, reshard
    from zerokit.checkpoint.inspect import inspect
    from zerokit.checkpoint.listing import list_steps
    from zerokit.checkpoint.load import load
    from zerokit.checkpoint.nodes.copies import Copies
    from zerokit.checkpoint.nodes.gather import gather
    from zerokit.checkpoint.prune import prune
    from zerokit.checkpoint.reader import Checkpoint
    from zerokit.checkpoint.save import save
    from zerokit.checkpoint.verify import verify
    from zerokit.errors import (
        CheckpointError,
        LayoutMismatch,
        LossScaleError,
        NonFiniteError,
        ScheduleError,
        UnsupportedOptimizer,
        UsageError,
        ZerokitError,
        ZerokitWarning,
    )
    from zerokit.runtime import LossScale, MemoryReport, Precision, TrafficReport, release
    from zerokit.training import Batches, Ema, LocalSteps, StopSignal, ZeroOptimizer

__version__ = "0.1.0"

__all__ = [
    "Batches",
    "Checkpoint",
    "CheckpointError",
    "Copies",
    "Ema",
    "LayoutMismatch",
    "LocalSteps",
    "LossScale",
    "LossScaleError",
    "MemoryReport",
    "NonFiniteError",
    "Precision",
    "ScheduleError",
    "StopSignal",
    "TrafficReport",
    "UnsupportedOptimizer",
    "UsageError",
    "ZeroOptimizer",
    "ZerokitError",
    "ZerokitWarning",
    "__version__",
    "check_run",
    "consolidate",
    "convert",
    "diff",
    "gather",
    "inspect",
    "list_steps",
    "load",
    "plan",
    "prune",
    "release",
    "reshard",
    "save",
    "verify",
]

_HOMES = {
    **dict.fromkeys(
        ("LossScale", "MemoryReport", "Precision", "TrafficReport", "release"), "zerokit.runtime"
    ),
    **dict.fromkeys(("Batches", "Ema", "LocalSteps", "StopSignal", "ZeroOptimizer"), "zerokit.training"),
    "Checkpoint": "zerokit.checkpoint.reader",
    "Copies": "zerokit.checkpoint.nodes.copies",
    "plan": "zerokit.bench.plans.ask",
    **dict.fromkeys(("consolidate", "convert", "reshard"), "zerokit.checkpoint.formats.convert"),
    "check_run": "zerokit.checkpoint.check",
    "gather": "zerokit.checkpoint.nodes.gather",
    "list_steps": "zerokit.checkpoint.listing",
    **{name: f"zerokit.checkpoint.{name}" for name in ("diff", "inspect", "load", "prune", "save", "verify")},
}
"""Where a public name lives; the others are errors."""


if not TYPE_CHECKING:  # a type checker that saw it would accept any name

    def __getattr__(name: str) -> object:
        """Import the module that holds `name`, once (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(_HOMES.get(name, "zerokit.errors"))
        value = getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


guard_workers()
