"""Settings of all tests: those that need a GPU, or root with namespaces, skip without; nothing else may."""

from __future__ import annotations

import contextlib
import os
import subprocess

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
    """Skips tests marked `gpu` on a machine without one, and tests marked `netns` where that cannot be had."""
    rooted = [item for item in items if item.get_closest_marker("netns")]
    if rooted and (reason := _no_namespaces()) is not None:
        for item in rooted:
            item.add_marker(pytest.mark.skip(reason=reason))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _no_namespaces() -> str | None:
    """Why tests cannot have namespaces of their own; None if they can."""
    command = ["unshare", "--mount", "--net", "--uts", "ip", "link", "set", "lo", "up"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"needs root, unshare and ip: {error}"
    return None if done.returncode == 0 else f"needs root and namespaces: {done.stderr.strip()}"
