"""One step under the profiler: launches, copies, waits of the host, and what communication costs beyond computation.

The trace is Chrome's JSON as the profiler writes it. A small kernel before the step and one behind it mark what belongs
to the step, on the device as on the host.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from zerokit.bench.measure.clock import exposed, merge

LARGEST_BYTES = 1_000_000
"""The most that a trace may have to be kept."""
_TOP, _NAME = 8, 90
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_BY_HOST = ("cuda_runtime", "cuda_driver")
_COMMUNICATES = ("nccl", "onerankreduce", "spin_kernel")
"""Parts of names of kernels, in lower case: NCCL's, its reduction on one rank, and `torch.cuda._sleep`'s."""
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls that return when the device has come that far."""


@dataclass(frozen=True)
class StepTrace:
    """What a trace says of one step. Times are unions over streams.

    Attributes:
        launches: kernels that the host launched.
        copies: copies and fills that are no kernels, `copied_bytes` the bytes of these copies.
        syncs: calls of the host that wait for the device.
        busy_ms: time in which any stream works.
        communication_ms: time in which communication runs, `exposed_ms` that in which nothing else does.
        top: the kernels with the most time: their names, calls and milliseconds.
    """

    launches: int
    copies: int
    copied_bytes: int
    syncs: int
    busy_ms: float
    communication_ms: float
    exposed_ms: float
    top: list[dict[str, Any]]


def read_trace(events: Iterable[Mapping[str, Any]]) -> StepTrace | None:
    """The step between the first and the last launch; None where there are none."""
    events = [event for event in events if event.get("ph") == "X"]
    by_host = sorted((e for e in events if e.get("cat") in _BY_HOST), key=lambda event: event["ts"])
    issued = [event for event in by_host if _issues(event["name"])]
    if len(issued) < 2:
        return None
    begin, end = issued[0]["ts"], issued[-1]["ts"]
    ours = {event["args"].get("correlation") for event in issued[1:-1]} - {None}
    device = [
        event
        for event in events
        if event.get("cat") in _ON_DEVICE and event["args"].get("correlation") in ours
    ]
    kernels = [event for event in device if event["cat"] == "kernel"]
    copies = [event for event in device if event["cat"] != "kernel"]
    wire = [event for event in device if _communicates(event["name"])]
    rest = [event for event in device if not _communicates(event["name"])]
    spans, hidden = _spans(wire), _spans(rest)
    return StepTrace(
        launches=sum("Launch" in event["name"] for event in issued[1:-1]),
        copies=len(copies),
        copied_bytes=sum(int(event["args"].get("bytes", 0)) for event in copies if "memcpy" in event["cat"]),
        syncs=sum(begin < event["ts"] < end and event["name"] in _WAITS for event in by_host),
        busy_ms=_length([*spans, *hidden]) / 1e3,
        communication_ms=_length(spans) / 1e3,
        exposed_ms=exposed(spans, hidden) / 1e3,
        top=_top(kernels),
    )


def _issues(name: str) -> bool:
    """Whether a call of the host gives a stream work."""
    return name.startswith(("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset", "cuMemcpy", "cuMemset"))


def _communicates(name: str) -> bool:
    return any(part in name.lower() for part in _COMMUNICATES)


def _spans(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, float]]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events]


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in merge(spans))


def _top(kernels: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    totals: dict[str, list[float]] = {}
    for event in kernels:
        totals.setdefault(event["name"][:_NAME], []).append(event["dur"] / 1e3)
    most = sorted(totals.items(), key=lambda item: -sum(item[1]))[:_TOP]
    return [{"name": name, "calls": len(times), "ms": sum(times)} for name, times in most]


def trace_step(step: Callable[[], object], device: torch.device, path: Path) -> dict[str, Any]:
    """The trace of a step, also written to `path`, which ends with .json.gz, if that is small enough to be kept.

    On a host it is a trace of the host's operations, of which nothing is read.
    """
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        torch.zeros(1, device=device)
        step()
        torch.zeros(1, device=device)
        if on_gpu:
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = read_trace(events)
    file_bytes = path.stat().st_size
    if file_bytes > LARGEST_BYTES:
        path.unlink()
    about = {"file": path.name if path.exists() else None, "file_bytes": file_bytes}
    return about if found is None else about | asdict(found)
