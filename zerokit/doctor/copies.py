"""How fast a device copies from and to pinned memory of its host: what states on the host cross in every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from zerokit.doctor.directory import PER_BILLION_BYTES
from zerokit.doctor.findings import Verdict
from zerokit.doctor.pace import slowest

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

COPY_BYTES = 256 << 20
SLOW_GB_PER_S = 5.0
"""Eight lanes of PCIe 3 reach about 6."""
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of the slowest rank while all ranks copy, in 10^9 bytes a second.

    Attributes:
        to_device_gb_per_s: from the host alone.
        to_host_gb_per_s: from the device alone.
        both_gb_per_s: each way, while the other way is in use as well.
    """

    to_device_gb_per_s: float
    to_host_gb_per_s: float
    both_gb_per_s: float


def measure_copies(group: dist.ProcessGroup, device: torch.device) -> Copies:
    """Copy from and to pinned memory, each way and both at once. All ranks of a gloo `group` call it.

    Raises `RuntimeError` where the system pins no memory.
    """
    import torch

    hosts = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def come() -> None:
        with torch.cuda.stream(streams[0]):
            devices[0].copy_(hosts[0], non_blocking=True)

    def leave() -> None:
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(devices[1], non_blocking=True)

    def rate(*calls: Callable[[], None]) -> float:
        return COPY_BYTES / _seconds(calls, group, device) / 1e9

    return Copies(rate(come), rate(leave), rate(come, leave))


def _seconds(calls: tuple[Callable[[], None], ...], group: dist.ProcessGroup, device: torch.device) -> float:
    import torch
    import torch.distributed as dist

    times = []
    for _ in range(1 + _ROUNDS):  # the first one warms up
        torch.cuda.synchronize(device)
        dist.barrier(group)
        started = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return slowest(group, median(times[1:]))


def judge_copies(copies: Copies) -> Verdict:
    """ZD204."""
    seconds = PER_BILLION_BYTES / copies.both_gb_per_s / 1e9
    listed = (
        f"{copies.to_device_gb_per_s:,.1f} GB/s to the device, {copies.to_host_gb_per_s:,.1f} to the host, "
        f"{copies.both_gb_per_s:,.1f} each way at once: {seconds:,.2f} s a step per 10⁹ parameters"
    )
    if copies.both_gb_per_s >= SLOW_GB_PER_S:
        return Verdict.ok(listed)
    return Verdict.warning(
        listed,
        'The link is slower than eight lanes of PCIe 3, so steps with states="host" take long.',
        "compare pcie.link.gen and pcie.link.width in nvidia-smi -q with the slot, and bind ranks to the device's node "
        "(numactl)",
    )
