"""The machine, and what a process holds on its device before it trains."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import distributions
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_check.alone import alone
from benchmarks.gpu_check.place import Place
from zerokit import ZeroOptimizer

_ROUNDS = 10


def used_bytes() -> int | None:
    """Bytes in use on the first device, of all processes, and without a context of this one; None where unknown."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used)
    return None


def _driver() -> str | None:
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        found = nvml.nvmlSystemGetDriverVersion()
    except Exception:  # no library, or no driver
        return None
    return found if isinstance(found, str) else found.decode()


def environment(place: Place) -> dict[str, Any]:
    """Versions, rates of a copy and of a product in bf16, and bytes of the context and of communicators."""
    on_gpu = place.device.type == "cuda"
    before = used_bytes() if on_gpu else None
    torch.zeros(1, device=place.device)
    context = _grown(before, place)
    numel, side = (1 << 22, 256) if place.small else (1 << 30, 8192)
    copied_tb_s = 2 * 4 * numel / _copy_seconds(place, numel) / 1e12
    tflops = 2 * side**3 / _product_seconds(place, side) / 1e12
    communicators = _communicators(place)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None
    device = (
        torch.cuda.get_device_name(place.device) if on_gpu else platform.processor() or platform.machine()
    )
    row = (
        f"{device}, torch {torch.__version__}, NCCL {nccl}, driver {_driver()}; copy {copied_tb_s:.3f} TB/s, "
        f"{side}³ bf16 {tflops:.1f} TFLOP/s; context {_mb(context)}, communicators "
        + ", ".join(f"{name} {_mb(size)}" for name, size in communicators.items())
    )
    return {
        "row": row,
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "driver": _driver(),
        "python": platform.python_version(),
        "memory_bytes": torch.cuda.get_device_properties(place.device).total_memory if on_gpu else None,
        "copy_tb_per_s": copied_tb_s,
        "bf16_tflops": tflops,
        "context_bytes": context,
        "communicator_bytes": communicators,
        "packages": {one.name: one.version for one in distributions()},
    }


def _copy_seconds(place: Place, numel: int) -> float:
    source = torch.zeros(numel, dtype=torch.float32, device=place.device)
    return _seconds(place, partial(torch.empty_like(source).copy_, source))


def _product_seconds(place: Place, side: int) -> float:
    left, right = (torch.randn(side, side, device=place.device).bfloat16() for _ in range(2))
    return _seconds(place, partial(torch.mm, left, right))


def _communicators(place: Place) -> dict[str, int | None]:
    """Bytes outside of torch's allocator: of a default group in use, and of what an optimizer makes beside it."""
    grown = {}
    before = used_bytes() if place.device.type == "cuda" else None
    reserved = torch.cuda.memory_reserved(place.device) if before is not None else 0
    with alone(place):
        torch.distributed.all_reduce(torch.zeros(1, device=place.device))
        grown["default group"] = _grown(before, place, reserved)
        model = torch.nn.Linear(64, 64, device=place.device)
        ZeroOptimizer(model, torch.optim.SGD, stage=3, lr=0.1)
        both = _grown(before, place, reserved)
        grown["zerokit's"] = None if both is None else both - (grown["default group"] or 0)
    return grown


def _grown(before: int | None, place: Place, reserved: int = 0) -> int | None:
    """By how many bytes the device's use has grown beside what torch's allocator has reserved, then and now."""
    if before is None:
        return None
    torch.cuda.synchronize(place.device)
    now = used_bytes()
    return None if now is None else now - before - (torch.cuda.memory_reserved(place.device) - reserved)


def _seconds(place: Place, call: Callable[[], object]) -> float:
    """The median of a call's seconds on the device."""
    seconds: list[float] = []
    for _ in range(_ROUNDS + 3):
        if place.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
    return median(seconds[3:])


def _mb(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:.0f} MB"
