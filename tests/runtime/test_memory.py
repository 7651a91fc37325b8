"""What the runtime asks of the host's allocator."""

from __future__ import annotations

import os
import platform
import resource

import pytest
import torch

from tests.support.distributed import run_alone
from zerokit.runtime.memory import keep_freed_memory

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc's heap is told what to keep"
)

_TENSORS, _BYTES = 128, 2**20


def _faults_of_a_step(before: str) -> int:
    """Page faults where many tensors are made and all of them freed, as gradients are, the third time."""
    if before == "set by the environment":
        os.environ["MALLOC_TOP_PAD_"] = "0"
    faults = 0
    for _ in range(3):
        start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(_BYTES // 4) for _ in range(_TENSORS)]
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start
        del tensors
        if before != "untold":
            keep_freed_memory()
    return faults


def test_freed_memory_is_used_again_without_page_faults() -> None:
    pages = _TENSORS * _BYTES // resource.getpagesize()
    assert run_alone(_faults_of_a_step, "untold") > pages // 2
    # The first round's tensors had pages of their own, so what the second one's left on the heap serves the third.
    assert run_alone(_faults_of_a_step, "told") < pages // 20


def test_settings_from_the_environment_stand() -> None:
    pages = _TENSORS * _BYTES // resource.getpagesize()
    assert run_alone(_faults_of_a_step, "set by the environment") > pages // 2
