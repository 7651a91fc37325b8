"""The device and backend of one rank, and what measurements do on all ranks: time calls, find a maximum, gather."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from zerokit.bench.machine.host import identify
from zerokit.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The device of one rank and its backend; as in DeepSpeed and Lightning, a CPU counts as an accelerator."""

    device: torch.device
    backend: str

    @property
    def is_cuda(self) -> bool:
        """Whether the host runs ahead of the device."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has finished its work; a CPU always has."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def maximum(self, values: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
        """Each value's maximum over all ranks. Collective: all ranks pass the same number of values."""
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return [float(value) for value in largest.tolist()]

    def seconds(
        self, call: Callable[[], object], group: dist.ProcessGroup, *, rounds: int, warmup: int = 1
    ) -> float:
        """The time of a call that all ranks of `group` begin at once: the slowest rank's median over `rounds`."""
        times = []
        for _ in range(warmup + rounds):
            dist.barrier(group)
            self.synchronize()
            started = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - started)
        return self.maximum([median(times[warmup:])], group)[0]


def gather(mine: T) -> list[T]:
    """Every rank's value, by rank. Collective."""
    gathered = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def choose_accelerator(wanted: str | None) -> Accelerator:
    """The device and backend of this rank, from the torchrun environment.

    Simulated nodes share this machine's devices (`ZEROKIT_NODES_ON_MACHINE` of them): ranks then count the devices
    through all nodes. NCCL refuses two ranks on one device, so where ranks share devices gloo serves CUDA tensors.

    Args:
        wanted: "cpu", "cuda" or None for CUDA where there is any.

    Raises `UsageError` if "cuda" is wanted and there is none.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if wanted == "cpu" or not available:
        return Accelerator(torch.device("cpu"), "gloo")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    nodes_here = int(os.environ.get("ZEROKIT_NODES_ON_MACHINE", "1"))
    if nodes_here > 1:
        local_rank += int(os.environ["GROUP_RANK"]) * local_world
    devices = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % devices)
    enough = devices >= local_world * nodes_here or (nodes_here == 1 and _is_nobody_elses(device))
    return Accelerator(device, "nccl" if enough else "gloo")


_stores: list[object] = []
"""Kept: rank 0's serves the others, and the process group afterwards."""


def _is_nobody_elses(device: torch.device) -> bool:
    """Whether no two ranks of this node have one device: `srun --gpus-per-task` shows each only its own.

    All ranks of a node call it.
    """
    store = next(rendezvous("env://"))[0]
    _stores.append(store)
    node, rank, ranks = (os.environ[name] for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    store.set(f"zerokit/device/{node}/{rank}", device_id(Accelerator(device, "nccl")))
    found = {store.get(f"zerokit/device/{node}/{one}") for one in range(int(ranks))}
    return len(found) == int(ranks)


def device_id(accelerator: Accelerator) -> str | None:
    """The identity of this rank's device (`host.identify`); None for a CPU."""
    if not accelerator.is_cuda:
        return None
    properties = torch.cuda.get_device_properties(accelerator.device)
    # Some builds of torch for ROCm tell no UUID.
    return identify(str(getattr(properties, "uuid", accelerator.device.index)), os.environ)
