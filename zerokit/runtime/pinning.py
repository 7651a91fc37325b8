"""Host memory that devices copy from and into by themselves."""

from __future__ import annotations

import contextlib
import mmap
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from zerokit.errors import ZerokitWarning


def pages(nbytes: int) -> Tensor:
    """At least so many bytes of memory that begins at a page, as direct reads and writes need it."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    mapped = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def pin(memory: Tensor, purpose: str) -> Tensor:
    """Let devices copy from and into `memory` by themselves, while this tensor lives; returns it.

    torch's own pinned memory is rounded up to a power of two. Warns where CUDA refuses it: copies are slower then.
    """
    cudart: Any = torch.cuda.cudart()
    address = memory.data_ptr()
    status = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
    if status != 0:
        warnings.warn(
            f"CUDA does not register memory for {purpose} (error {status}; a limit of locked memory?): the device's "
            "copies from and into it are slower",
            ZerokitWarning,
            stacklevel=2,
        )
        return memory
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return memory


def content_of(memory: Tensor) -> memoryview:
    """The bytes of host memory, for files."""
    array: Any = memory.numpy()
    return memoryview(array)
