"""The C library's heap on Linux hosts: when it hands freed pages back to the system. CUDA tensors do not lie in it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

import torch

_M_TRIM_THRESHOLD = -1
"""glibc's malloc.h, mallopt(3)."""
_SETTLING_PASSES = 3
"""The heap settles in the first passes; where parameters stay whole, later ones would only pay for fresh pages."""


class Heap:
    """The heap that a model's tensors lie in, if any.

    Args:
        device: of the model; on another one than a host nothing is ever done.
        settles: whether the same tensors come and go in every pass. They do not where units are gathered and freed.
    """

    def __init__(self, device: torch.device, *, settles: bool) -> None:
        self._serves = device.type == "cpu" and sys.platform == "linux"
        self._settles = settles
        self._passes = 0

    def return_freed_memory(self) -> None:
        """Hand pages of freed memory back to the system: the heap keeps them otherwise."""
        if self._serves:
            _call("malloc_trim", 0)

    def note_forward(self) -> None:
        """A forward pass has ended: backward begins with the largest tensors, which no hole in the heap can take."""
        self._passes += 1
        if not self._settles or self._passes <= _SETTLING_PASSES:
            self.return_freed_memory()
        if self._settles and self._passes == _SETTLING_PASSES and self._serves:
            keep_freed_memory()


def keep_freed_memory() -> None:
    """Ask glibc to keep the free top of its heap from now on, unless the environment sets how much.

    By itself glibc keeps 64 MiB at most, so that every step would hand the rest back and fault it in again: a backward
    pass that drops each gradient at once frees much more. This also ends glibc's search for the size from which
    tensors get pages of their own: to be called when it has seen some steps.
    """
    tuned = "MALLOC_TRIM_THRESHOLD_" in os.environ or "trim_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if not tuned:
        _call("mallopt", _M_TRIM_THRESHOLD, -1)


def _call(name: str, *arguments: int) -> None:
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    if function is not None:  # another C library than glibc
        function(*arguments)
