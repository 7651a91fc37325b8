"""zerokit: a compact ZeRO runtime on PyTorch.

Importing this package loads nothing heavy: each name below is resolved when it is first used, so that the
offline commands start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerokit.errors import (
        CheckpointError,
        LayoutMismatch,
        LossScaleError,
        ScheduleError,
        UnsupportedOptimizer,
        UsageError,
        ZerokitError,
    )
    from zerokit.runtime import LossScale, MemoryReport, Precision, TrafficReport, ZeroOptimizer

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "LayoutMismatch",
    "LossScale",
    "LossScaleError",
    "MemoryReport",
    "Precision",
    "ScheduleError",
    "TrafficReport",
    "UnsupportedOptimizer",
    "UsageError",
    "ZeroOptimizer",
    "ZerokitError",
    "__version__",
]

_RUNTIME_NAMES = frozenset({"LossScale", "MemoryReport", "Precision", "TrafficReport", "ZeroOptimizer"})


if not TYPE_CHECKING:  # a type checker that saw it would accept any name

    def __getattr__(name: str) -> object:
        """Import the module that holds `name`, once (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module("zerokit.runtime" if name in _RUNTIME_NAMES else "zerokit.errors")
        value = getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
