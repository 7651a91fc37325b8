"""One rank of a cell: `python -m benchmarks.rank DIRECTORY RANK`, started by `benchmarks.cells`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cells import CellSpec, RankResult
from benchmarks.engines import make_step
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.machine.place import Place, peak_host_bytes


def main(directory: Path, rank: int) -> None:
    """Train as `spec.json` says and write `rank-RANK.json` beside it."""
    spec = CellSpec(**json.loads((directory / "spec.json").read_text()))
    torch.set_num_threads(spec.threads)
    device = torch.device(spec.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        spec.backend,
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=spec.world,
        timeout=timedelta(seconds=120),
    )
    result = train(spec, rank, device)
    (directory / f"rank-{rank}.json").write_text(json.dumps(asdict(result)))
    dist.barrier()
    dist.destroy_process_group()


def train(spec: CellSpec, rank: int, device: torch.device) -> RankResult:
    """Build the engine, warm it up, and time its steps."""
    torch.manual_seed(spec.seed)
    text = describe(spec.model).text
    assert text is not None
    step = make_step(spec, Place(device, spec.backend))
    # On the device before anything is timed: a copy from ordinary host memory lets the host wait for the device.
    batches = [
        [tensor.to(device) for tensor in _batch(spec, rank, number, text.vocabulary)]
        for number in range(spec.warmup + spec.steps)
    ]
    losses: list[Tensor] = []
    clock = _CudaClock() if device.type == "cuda" else _HostClock()
    dist.barrier()
    for number, (tokens, targets) in enumerate(batches):
        if number >= spec.warmup:
            clock.tick()
        losses.append(step(tokens, targets))
    clock.tick()
    step_ms = clock.intervals_ms()
    return RankResult(
        step_ms=step_ms,
        losses=[float(loss) for loss in losses],
        peak_rss_bytes=peak_host_bytes(),
        peak_cuda_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    )


def _batch(spec: CellSpec, rank: int, number: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed((spec.seed * 1_000_003 + number) * 1_009 + rank)
    line = torch.randint(vocabulary, (spec.batch_size, spec.seq_len + 1), generator=generator)
    return line[:, :-1].contiguous(), line[:, 1:].contiguous()


class _HostClock:
    def __init__(self) -> None:
        self._times: list[float] = []

    def tick(self) -> None:
        self._times.append(time.perf_counter())

    def intervals_ms(self) -> list[float]:
        return [1e3 * (after - before) for before, after in zip(self._times, self._times[1:], strict=False)]


class _CudaClock:
    """Events in the model's stream: the host never waits, so steps may overlap as in training."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def tick(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def intervals_ms(self) -> list[float]:
        torch.cuda.synchronize()
        return [
            before.elapsed_time(after) for before, after in zip(self._events, self._events[1:], strict=False)
        ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
