"""Settings of all tests: where a GPU is needed and missing, a test skips; nothing else may."""

from __future__ import annotations

import contextlib
import os

import pytest


def pytest_configure() -> None:
    """Makes all processes of the tests batch jobs, which never take a core from a thread that is at work.

    gloo's socket thread spins while another thread holds its connection's lock. With more ranks than cores it often
    wakes on the very core where that thread is, and spins until the scheduler lets that one go on.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` on a machine without one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
