"""CUDA devices: the driver, torch's build, and one device per rank."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zerokit.bench.machine.host import find_gpus, torch_uses_cuda, visible
from zerokit.cuts import reduced
from zerokit.doctor.findings import Verdict, fault, ok, warning
from zerokit.planning.hardware import known_device

_LISTED = 16
"""The most ranks whose shares a line lists."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one rank; `identity` is its UUID, else its index on its machine."""

    name: str
    identity: str


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that one process sees."""

    driver: str | None  # version of the NVIDIA driver; None without one
    present: int  # NVIDIA devices of the machine
    visible: int  # those that `CUDA_VISIBLE_DEVICES` leaves
    built_for_cuda: bool  # whether torch was
    usable: int | None = None  # devices that torch can use; None where torch was not imported
    used: Device | None = None  # the device of this rank


def look_at_devices(used: Device | None) -> Devices:
    """Collect the devices that this process sees, and the one that it uses.

    torch is used only if it is already imported.
    """
    gpus, torch = find_gpus(), sys.modules.get("torch")
    return Devices(
        driver=_driver(),
        present=len(gpus),
        visible=len(visible(gpus, os.environ)),
        built_for_cuda=torch_uses_cuda(),
        usable=None if torch is None else (torch.cuda.device_count() if torch.cuda.is_available() else 0),
        used=used,
    )


def _driver() -> str | None:
    try:
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return match.group() if match else "of unknown version"


def judge_devices(devices: Devices) -> Verdict:
    """ZD201."""
    if devices.driver is None and devices.present == 0:
        built = "; torch is built for CUDA" if devices.built_for_cuda else ""
        return ok(f"none: CPU only{built}")
    seen = f"driver {devices.driver}, {devices.present} devices, {devices.visible} visible"
    if not devices.built_for_cuda:
        return fault(
            f"{seen}; torch is built without CUDA",
            "torch cannot use the devices of this machine and trains on its CPU.",
            "install a build of torch for CUDA, see https://pytorch.org/get-started/locally",
        )
    if devices.visible == 0:
        return warning(
            seen,
            "CUDA_VISIBLE_DEVICES hides all devices, or a container shows none: training runs on the CPU.",
            "unset CUDA_VISIBLE_DEVICES, or start the container with devices (--gpus all)",
        )
    if devices.usable is not None and devices.usable < devices.visible:
        return fault(
            f"{seen}; torch can use {devices.usable}",
            "The driver is too old for the CUDA that torch was built for, or a device does not answer.",
            "compare nvidia-smi with torch.version.cuda; update the driver, or install torch for an older CUDA",
        )
    return ok(seen)


def judge_one_a_rank(used: Device | None, on_machine: Sequence[tuple[int, Device | None]]) -> Verdict | None:
    """ZD202, from the ranks of the same machine and their devices."""
    if used is None:
        return None
    users = [str(rank) for rank, device in on_machine if device == used]
    if len(users) == 1:
        return ok("every rank has a device of its own")
    return warning(
        f"ranks {', '.join(users)} share {used.name} {used.identity}",
        "NCCL refuses two ranks on one device: gloo would serve them, through the host's memory.",
        "lower --nproc-per-node to the number of visible devices",
    )


def judge_same(used: Sequence[Device | None]) -> Verdict | None:
    """ZD203."""
    names = [device.name for device in used if device is not None]
    counts = Counter(names)
    listed = ", ".join(f"{count} × {name}" for name, count in counts.items())
    if len(counts) < 2:
        return ok(listed) if counts else None
    return warning(
        listed,
        "With equal shards and batches the smallest device sets the size, and the slowest one the pace.",
        f"use nodes of one kind, or {_shares(names)}, and Batches(pace=zerokit.Pace(optimizer)), see docs/unequal.md",
    )


def _shares(names: Sequence[str]) -> str:
    """The shares that fit these devices, by the memory that their data sheets give."""
    known = [known_device(name) for name in names]
    sizes = [device.memory_bytes >> 30 for device in known if device is not None]
    if len(sizes) < len(names) or len(names) > _LISTED:
        return 'ZeroOptimizer(shares="memory")'
    shares = reduced(len(sizes), sizes)
    return f"ZeroOptimizer(shares={shares})" if shares else "equal shares, as their memory is equal"
