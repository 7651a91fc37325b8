"""One rank of a bench: train, measure, hand the numbers to rank 0, which writes the record.

    torchrun ... -m zerokit.bench.worker JOB.json

The job is `{"settings": {…}, "record": PATH, "progress": PATH or null, "sweep": ID or null}`. The rank knows the
torchrun environment and nothing of who started it. A rank that runs out of memory says so beside the job (`status`).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from zerokit.bench.checkpoints import Keeper
from zerokit.bench.engines.trainer import Trainer, make
from zerokit.bench.measure.bandwidth import measure_bandwidth
from zerokit.bench.measure.environment import look_around
from zerokit.bench.measure.machine import Place, choose_place, peak_host_bytes
from zerokit.bench.measure.phases import measure_phases
from zerokit.bench.measure.sampler import Sampler
from zerokit.bench.progress import ProgressWriter
from zerokit.bench.record import Rank, Record, Samples, Traffic, summarise, write_record
from zerokit.bench.schema import from_plain, to_plain
from zerokit.bench.settings import Settings
from zerokit.bench.status import OUT_OF_MEMORY, Status, write_status
from zerokit.bench.training import Loop, Measured
from zerokit.bench.workloads.build import load
from zerokit.bench.workloads.catalogue import describe
from zerokit.errors import ZerokitError


class OutOfMemory(ZerokitError):
    """A rank's device or host memory did not suffice."""


@dataclass(frozen=True, slots=True)
class FromRank:
    """What each rank hands to rank 0."""

    rank: Rank
    loss: list[float]
    samples: Samples | None


def choose(settings: Settings, place: Place) -> Settings:
    """The settings with what was left open: device, precision, data, image size, zerokit's bucket size."""
    workload = describe(settings.model)
    image_size, bucket_mb = settings.image_size, settings.bucket_mb
    if image_size is None and workload.images is not None:
        image_size = workload.images.image_size
    if bucket_mb is None and settings.engine == "zerokit":
        from zerokit.runtime.optimizer import DEFAULT_BUCKET_MB

        bucket_mb = DEFAULT_BUCKET_MB
    return replace(
        settings,
        device=place.device.type,
        precision=settings.precision or ("bf16" if place.device.type == "cuda" else "fp32"),
        data=settings.data or workload.default_data,
        image_size=image_size,
        bucket_mb=bucket_mb,
    )


def run(asked: Settings, record_path: Path, progress_path: Path | None, sweep: str | None) -> None:
    """Bench on this rank, inside the process group of all ranks."""
    place = choose_place(asked.device)
    settings = choose(asked, place)
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    loaded = load(settings)
    dist.init_process_group(place.backend)
    writer = ProgressWriter(progress_path if dist.get_rank() == 0 else None)

    started = time.perf_counter()
    trainer = make(loaded, settings, place)
    place.synchronize()
    build_ms = (time.perf_counter() - started) * 1000.0
    loop = Loop(trainer, loaded, settings, place)
    sampler = Sampler() if os.environ.get("LOCAL_RANK", "0") == "0" else None
    keeper = Keeper(settings, trainer.zero)
    measured = loop.run(writer, keeper, begin=sampler.start if sampler is not None else _nothing)
    ended = datetime.now(UTC)
    samples = None if sampler is None else sampler.stop()
    writer.close()
    settings = replace(settings, warmup=measured.warmup)

    # What follows the measured steps takes memory and sends bytes of its own: theirs are looked at first.
    rank = _rank(measured, place, build_ms)
    traffic = _traffic(trainer, settings)
    skipped_steps = trainer.skipped_steps
    mine = FromRank(with_state(rank, trainer, loop), measured.loss, samples)
    phases = measure_phases(trainer, loop, place, steps=settings.steps)
    bandwidth = measure_bandwidth(trainer, loaded.model.parameters, settings, place)
    gathered: list[FromRank] = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    if dist.get_rank() == 0:
        ranks = [one.rank for one in gathered]
        loss = [sum(losses) / len(losses) for losses in zip(*(one.loss for one in gathered), strict=True)]
        record = Record(
            id=uuid.uuid4().hex,
            cell=asked.key,
            status="ok",
            sweep=sweep,
            created=ended.isoformat(timespec="seconds"),
            settings=settings,
            model=loaded.model,
            data=loaded.data,
            environment=look_around(place),
            ranks=ranks,
            traffic=traffic,
            bandwidth=bandwidth,
            phases=phases,
            system=[one.samples for one in gathered if one.samples is not None],
            loss=list(loss),
            gradient_norm=list(measured.gradient_norm),
            skipped_steps=skipped_steps,
            results=summarise(settings, loaded.model, ranks, list(loss)),
            checkpoints=keeper.done,
        )
        write_record(record, record_path)
    dist.destroy_process_group()


def _nothing() -> None:
    pass


def _rank(measured: Measured, place: Place, build_ms: float) -> Rank:
    on_cuda = place.device.type == "cuda"
    return Rank(
        rank=dist.get_rank(),
        node=int(os.environ.get("GROUP_RANK", "0")),
        host=socket.gethostname(),
        pid=os.getpid(),
        device=torch.cuda.get_device_name(place.device) if on_cuda else "cpu",
        step_ms=measured.step_ms[measured.warmup :],
        warmup_ms=measured.step_ms[: measured.warmup],
        build_ms=build_ms,
        peak_host_bytes=peak_host_bytes(),
        peak_allocated_bytes=torch.cuda.max_memory_allocated(place.device) if on_cuda else None,
        peak_reserved_bytes=torch.cuda.max_memory_reserved(place.device) if on_cuda else None,
        memory_bytes=None,
        predicted_memory_bytes=None,
    )


def with_state(rank: Rank, trainer: Trainer, loop: Loop) -> Rank:
    """The rank with zerokit's account of its state, taken at the end of the backward pass of one more step."""
    zero = trainer.zero
    if zero is None:
        return rank
    trainer.differentiate(loop.batches(loop.measured.trained))
    held, predicted = zero.memory(), zero.predicted_memory()
    trainer.update()
    return replace(
        rank,
        memory_bytes={**held.as_dict(), "total": held.total},
        predicted_memory_bytes={**predicted.as_dict(), "total": predicted.total},
    )


def _traffic(trainer: Trainer, settings: Settings) -> Traffic | None:
    if trainer.zero is None:
        return None
    measured = trainer.zero.traffic()
    predicted = trainer.zero.predicted_traffic(micro_batches=settings.accumulate)
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
        route=trainer.zero.parts.collectives.route if settings.world > 1 else None,
    )


def main(job: Path) -> None:
    """Run the job; an out-of-memory error becomes an `OutOfMemory` that says what may help."""
    asked = json.loads(job.read_text())
    settings = from_plain(Settings, asked["settings"])
    progress = asked.get("progress")
    try:
        run(settings, Path(asked["record"]), Path(progress) if progress else None, asked.get("sweep"))
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = _out_of_memory(settings, str(error))
        write_status(job, Status(OUT_OF_MEMORY, reason))
        raise OutOfMemory(reason) from error


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether Python, torch's CUDA allocator (a RuntimeError of its own) or its CPU allocator had no more to give."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _out_of_memory(settings: Settings, message: str) -> str:
    reason = message.strip().splitlines()[0][:300] if message.strip() else "no detail given"
    parameters = describe(settings.model).parameters
    size = "" if parameters is None else f" ({parameters / 1e6:.1f} M parameters)"
    return (
        f"out of memory: {settings.model}{size}, {settings.engine} stage {settings.stage}, {settings.world} ranks, "
        f"batch {settings.batch_size}. A higher --stage or more ranks shard more of the state; a smaller --batch-size "
        f"or --seq-len needs less for activations. ({reason})"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
