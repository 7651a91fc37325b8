"""What this process runs on: its device, its peak memory, the names of processor and software."""

from __future__ import annotations

import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerokit.bench.machine.devices import identify
from zerokit.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Where one rank computes, and the backend that serves it."""

    device: torch.device
    backend: str

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it; a CPU always has."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


def choose_accelerator(wanted: str | None) -> Accelerator:
    """The device and backend of this rank, from the torchrun environment.

    Simulated nodes share this machine's devices, which `ZEROKIT_NODES_ON_MACHINE` tells: ranks then count the
    devices through all nodes. NCCL refuses two ranks on one device, so with fewer devices than ranks gloo
    serves CUDA tensors.

    Args:
        wanted: "cpu", "cuda" or None for CUDA where there is any.

    Raises `UsageError` if "cuda" is wanted and there is none.
    """
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError("device 'cuda' was asked for, but torch finds no CUDA device here; use --device cpu")
    if wanted == "cpu" or not available:
        return Accelerator(torch.device("cpu"), "gloo")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    nodes_here = int(os.environ.get("ZEROKIT_NODES_ON_MACHINE", "1"))
    if nodes_here > 1:
        local_rank += int(os.environ["GROUP_RANK"]) * local_world
    devices = torch.cuda.device_count()
    backend = "nccl" if devices >= local_world * nodes_here else "gloo"
    return Accelerator(torch.device("cuda", local_rank % devices), backend)


def device_id(accelerator: Accelerator) -> str | None:
    """The identity of this rank's device (`devices.identify`); None for a CPU."""
    if accelerator.device.type != "cuda":
        return None
    import torch

    uuid = getattr(torch.cuda.get_device_properties(accelerator.device), "uuid", None)
    return identify(accelerator.device.index, None if uuid is None else str(uuid), os.environ)


def peak_host_bytes() -> int:
    """The most resident memory that this process has had.

    From /proc where there is one: there `ru_maxrss` would start at what the parent held when it forked.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def processor_name() -> str:
    """The CPU's name, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def memory_bytes() -> int:
    """Main memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
