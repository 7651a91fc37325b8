"""Ranges with units' names on the profiler's timeline (torch.profiler, or emit_nvtx for Nsight)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

from zerokit.layout import Unit

_NOTHING = nullcontext()


def profiled(what: str, unit: Unit | None = None) -> AbstractContextManager[object]:
    """A range `zerokit: WHAT UNIT` around a block; costs a look at a flag where nothing is profiled."""
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return profiler.record_function(f"zerokit: {what}" if unit is None else f"zerokit: {what} {unit.name}")
