"""What the runtime asks of the host's allocator."""

from __future__ import annotations

import ctypes
import platform
import resource

import pytest

from tests.support.distributed import run_alone
from zerokit.runtime.linux import keep_freed_memory

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc's heap is told what to keep"
)

_BLOCKS, _BYTES = 256, 2**20
_PAGES = _BLOCKS * _BYTES // resource.getpagesize()


def _faults_of_a_step() -> int:
    """Page faults where much is allocated and all of it freed, as gradients are, the third time."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    faults = 0
    for _ in range(3):
        start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [ctypes.c_void_p(library.malloc(_BYTES)) for _ in range(_BLOCKS)]
        for block in blocks:
            ctypes.memset(block, 1, _BYTES)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start
        for block in blocks:
            library.free(block)
        keep_freed_memory()
    return faults


def test_freed_memory_is_used_again_without_page_faults() -> None:
    # The first round's blocks had pages of their own; what the second round left on the heap serves the third.
    assert run_alone(_faults_of_a_step) < _PAGES // 20
