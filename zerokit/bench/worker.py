"""One rank of a bench: train, measure, hand the numbers to rank 0, which writes the record.

    torchrun ... -m zerokit.bench.worker JOB.json

The job is `{"settings": {…}, "record": PATH, "progress": PATH or null}`. The rank knows the torchrun
environment and nothing of who started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
import time
import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from zerokit.bench.checkpoints import Keeper
from zerokit.bench.machine import Place, choose_place, cores, memory_bytes, peak_host_bytes, processor_name
from zerokit.bench.progress import Progress, ProgressWriter
from zerokit.bench.record import Environment, Rank, Record, Traffic, summarise, write_record
from zerokit.bench.schema import from_plain, to_plain
from zerokit.bench.settings import Settings
from zerokit.bench.workloads.build import Loaded, load
from zerokit.bench.workloads.catalogue import describe
from zerokit.errors import ZerokitError
from zerokit.runtime import ZeroOptimizer


class OutOfMemory(ZerokitError):
    """A rank's device or host memory did not suffice."""


@dataclass(slots=True)
class Measured:
    """What one rank saw of each step, warm-up first."""

    step_ms: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)


def train(
    model: nn.Module,
    optimizer: ZeroOptimizer,
    loaded: Loaded,
    settings: Settings,
    place: Place,
    writer: ProgressWriter,
    keeper: Keeper,
) -> Measured:
    """Run warm-up and measured steps, going on from a checkpoint where `keeper` finds one.

    The clock runs from before the forward to after the optimizer's step and the zeroing of gradients; on CUDA
    it waits for the device. Batches are prepared before it starts, losses are read after it has stopped.
    """
    measured = Measured()
    warmup = settings.warmup if settings.warmup is not None else 5
    total = warmup + settings.steps
    trained = keeper.resume()
    for step in range(total):
        batches = [
            _batch(loaded, trained + step, micro_batch, place) for micro_batch in range(settings.accumulate)
        ]
        if step == warmup:
            # All ranks begin the measured steps together. Not `barrier`: NCCL's asks for a device of its own.
            dist.all_reduce(torch.zeros(1, device=place.device))
        _synchronize(place)
        started = time.perf_counter()
        losses, norm = train_step(model, optimizer, batches, settings.clip)
        _synchronize(place)
        measured.step_ms.append((time.perf_counter() - started) * 1000.0)
        measured.loss.append(sum(float(loss) for loss in losses) / len(losses))
        if norm is not None:
            measured.gradient_norm.append(float(norm))
        writer.write(Progress(step + 1, total, warmup, measured.loss[-1], measured.step_ms[-1]))
        keeper.after_step(trained + step + 1, last=step == total - 1)
    return measured


def train_step(
    model: nn.Module, optimizer: ZeroOptimizer, batches: list[tuple[Tensor, ...]], clip: float | None
) -> tuple[list[Tensor], Tensor | None]:
    """One optimizer step over the micro-batches, reduced once; their losses and the gradient norm."""
    losses = []
    for place, tensors in enumerate(batches):
        last = place == len(batches) - 1
        with contextlib.nullcontext() if last else optimizer.accumulate():
            loss = model(*tensors)
            optimizer.backward(loss / len(batches))
        losses.append(loss.detach())
    norm = None if clip is None else optimizer.clip_grad_norm_(clip)
    optimizer.step()
    optimizer.zero_grad()
    return losses, norm


def _batch(loaded: Loaded, step: int, micro_batch: int, place: Place) -> tuple[Tensor, ...]:
    tensors = loaded.batch(step, dist.get_rank(), micro_batch)
    return tuple(tensor.to(place.device) for tensor in tensors)


def _synchronize(place: Place) -> None:
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)


def build_optimizer(loaded: Loaded, place: Place) -> tuple[nn.Module, ZeroOptimizer]:
    """The model, built on meta and so never whole in memory where the stage shards it, and its optimizer.

    Where gloo serves CUDA tensors it is built on the device: from a model on meta the runtime concludes CPU.
    """
    settings = loaded.settings
    on_meta = loaded.init_fn is not None and (place.backend == "nccl" or place.device.type == "cpu")
    with torch.device("meta") if on_meta else place.device:
        model = loaded.build()
    options: dict[str, Any] = {} if settings.bucket_mb is None else {"bucket_mb": settings.bucket_mb}
    optimizer = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=settings.stage,
        precision=settings.precision or "fp32",
        init_fn=loaded.init_fn if on_meta else None,
        lr=settings.lr,
        **options,
    )
    return model, optimizer


def run(settings: Settings, record_path: Path, progress_path: Path | None, sweep: str | None) -> None:
    """Bench on this rank, inside the process group of all ranks."""
    place = choose_place(settings.device)
    precision = settings.precision or ("bf16" if place.device.type == "cuda" else "fp32")
    asked = settings
    settings = replace(
        settings,
        device=place.device.type,
        precision=precision,
        warmup=5 if settings.warmup is None else settings.warmup,
        data=settings.data or describe(settings.model).default_data,
    )
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    loaded = load(settings)
    dist.init_process_group(place.backend)
    writer = ProgressWriter(progress_path if dist.get_rank() == 0 else None)

    started = time.perf_counter()
    model, optimizer = build_optimizer(loaded, place)
    _synchronize(place)
    build_ms = (time.perf_counter() - started) * 1000.0
    keeper = Keeper(settings, optimizer)
    measured = train(model, optimizer, loaded, settings, place, writer, keeper)
    ended = datetime.now(UTC)
    writer.close()

    memory, predicted = optimizer.memory(), optimizer.predicted_memory()
    on_cuda = place.device.type == "cuda"
    mine = Rank(
        rank=dist.get_rank(),
        node=int(os.environ.get("GROUP_RANK", "0")),
        host=socket.gethostname(),
        pid=os.getpid(),
        device=torch.cuda.get_device_name(place.device) if on_cuda else "cpu",
        step_ms=measured.step_ms[settings.warmup or 0 :],
        warmup_ms=measured.step_ms[: settings.warmup or 0],
        build_ms=build_ms,
        peak_host_bytes=peak_host_bytes(),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(place.device) if on_cuda else None,
        peak_reserved_bytes=torch.cuda.max_memory_reserved(place.device) if on_cuda else None,
        memory_bytes={**memory.as_dict(), "total": memory.total},
        predicted_memory_bytes={**predicted.as_dict(), "total": predicted.total},
    )
    traffic = _traffic(optimizer, settings)
    gathered: list[tuple[Rank, list[float]]] = [(mine, measured.loss)] * dist.get_world_size()
    dist.all_gather_object(gathered, (mine, measured.loss))
    if dist.get_rank() == 0:
        ranks = [rank for rank, _ in gathered]
        loss = [sum(losses) / len(losses) for losses in zip(*(losses for _, losses in gathered), strict=True)]
        record = Record(
            id=uuid.uuid4().hex,
            cell=asked.key,
            status="ok",
            sweep=sweep,
            created=ended.isoformat(timespec="seconds"),
            settings=settings,
            model=loaded.model,
            data=loaded.data,
            environment=_environment(place),
            ranks=ranks,
            traffic=traffic,
            loss=list(loss),
            gradient_norm=list(measured.gradient_norm),
            skipped_steps=optimizer.skipped_steps,
            results=summarise(settings, loaded.model, ranks, list(loss)),
            checkpoints=keeper.done,
        )
        write_record(record, record_path)
    dist.destroy_process_group()


def _traffic(optimizer: ZeroOptimizer, settings: Settings) -> Traffic:
    measured, predicted = optimizer.traffic(), optimizer.predicted_traffic(micro_batches=settings.accumulate)
    # Reduced once a step; stage 3 gathers parameters for the forward and the backward of each micro-batch,
    # less the units that it keeps.
    volume = 2 if settings.stage < 3 else 2 * settings.accumulate + 1
    return Traffic(
        elements=measured.elements,
        bytes=measured.bytes,
        control_bytes=measured.control_bytes,
        predicted_elements=predicted.elements,
        predicted_bytes=predicted.bytes,
        formula=f"{'at most ' if settings.stage == 3 else ''}(N−1)·{volume}Ψ elements",
        by_operation=to_plain(measured.by_operation),
    )


def _environment(place: Place) -> Environment:
    on_cuda = place.device.type == "cuda"
    return Environment(
        zerokit=zerokit.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        processor=processor_name(),
        cores=cores(),
        threads=torch.get_num_threads(),
        backend=place.backend,
        world=dist.get_world_size(),
        memory_bytes=memory_bytes(),
        accelerator=torch.cuda.get_device_name(place.device) if on_cuda else None,
        accelerators=torch.cuda.device_count() if on_cuda else 0,
        cuda=torch.version.cuda if on_cuda else None,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if place.backend == "nccl" else None,
        packages={},
        variables={},
        git_commit=None,
    )


def main(job: Path) -> None:
    """Run the job; an out-of-memory error becomes an `OutOfMemory` that says what may help."""
    asked = json.loads(job.read_text())
    settings = from_plain(Settings, asked["settings"])
    progress = asked.get("progress")
    try:
        run(settings, Path(asked["record"]), Path(progress) if progress else None, asked.get("sweep"))
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(_out_of_memory(settings, str(error))) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise OutOfMemory(_out_of_memory(settings, str(error))) from error


def _out_of_memory(settings: Settings, message: str) -> str:
    reason = message.strip().splitlines()[0][:300] if message.strip() else "no detail given"
    parameters = describe(settings.model).parameters
    size = "" if parameters is None else f" ({parameters / 1e6:.1f} M parameters)"
    return (
        f"out of memory: {settings.model}{size}, stage "
        f"{settings.stage}, {settings.world} ranks, batch {settings.batch_size}×{settings.seq_len}. A higher "
        "--stage or more ranks shard more of the state; a smaller --batch-size or --seq-len needs less for "
        f"activations. ({reason})"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
