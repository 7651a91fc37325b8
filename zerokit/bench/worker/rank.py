"""One rank of a bench: it trains, measures, and sends its measurements to rank 0, which writes the record.

    torchrun ... -m zerokit.bench.worker JOB.json

The job is `{"settings": {…}, "record": PATH, "progress": PATH or null, "sweep": ID or null}`, with paths relative to
its own folder, which may be a copy of the launcher's. With copies in the nodes' memory it has their directory as
"memory", and for a timeline the path of its file as "trace". The rank knows the torchrun environment and nothing of who
started it. A rank that runs out of memory writes so beside the job (`status`).
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.engines.trainer import Trainer, make
from zerokit.bench.machine.accelerator import Accelerator, choose_accelerator, device_id, gather
from zerokit.bench.machine.host import peak_host_bytes
from zerokit.bench.measure.bandwidth import measure_bandwidth
from zerokit.bench.measure.clock import measure_phases
from zerokit.bench.measure.environment import look_around
from zerokit.bench.measure.memory import measure_timeline
from zerokit.bench.measure.sampler import Sampler
from zerokit.bench.plans.subjects import PlanBeside
from zerokit.bench.record.journal import Journal, Story
from zerokit.bench.record.measured import DeviceMemory, Rank, Traffic
from zerokit.bench.record.record import Record, summarise, with_twin, write_record
from zerokit.bench.record.schema import from_plain, to_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.status import Outcome, Status, write_outcome
from zerokit.bench.trace.events import write_trace
from zerokit.bench.trace.step import trace_step
from zerokit.bench.worker.checkpoints import Keeper, mean_over_ranks
from zerokit.bench.worker.measured import Measured
from zerokit.bench.worker.training import Loop
from zerokit.bench.worker.twin import measure_twin
from zerokit.bench.workloads.build import load
from zerokit.errors import UsageError, ZerokitError
from zerokit.files import path_of


class OutOfMemory(ZerokitError):
    """A rank ran out of device or host memory."""


def choose(settings: Settings, accelerator: Accelerator) -> Settings:
    """The settings with defaults resolved: device, precision, data, image size, saving."""
    workload = describe(settings.model)
    own_size = None if workload.images is None else workload.images.image_size
    return replace(
        settings,
        device=accelerator.device.type,
        precision=settings.precision or ("bf16" if accelerator.is_cuda else "fp32"),
        data=settings.data or workload.default_data,
        image_size=own_size if settings.image_size is None else settings.image_size,
        save_every=settings.saves_every,
    )


def require_ranks(settings: Settings, environment: Mapping[str, str]) -> None:
    """Raise `UsageError` unless torchrun's variables name the ranks of the settings.

    Every rank checks, so that none waits for others, and none measures another world than its record says.
    """
    started = [environment.get(name, "unknown") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if started != [str(settings.world), str(settings.nproc_per_node)]:
        raise UsageError(
            f"the launcher started {started[0]} ranks, {started[1]} on this node, but the job's settings ask for "
            f"{settings.nodes} nodes × {settings.nproc_per_node} ranks"
        )


_groups: list[object] = []
"""Kept until the process leaves. DDP's reducer destroys a gloo group whose last owner it is while it holds Python's
lock, and waits for a thread of the group that waits for that lock (torch 2.11 and 2.13)."""


def run(
    asked: Settings,
    record_path: Path,
    progress_path: Path | None,
    sweep: str | None,
    memory: Path | None = None,
    trace_path: Path | None = None,
) -> None:
    """Run the bench on this rank, inside the process group of all ranks.

    `memory` is for copies of its state, `trace_path` for the timeline of an extra step.
    """
    require_ranks(asked, os.environ)
    accelerator = choose_accelerator(asked.device)
    settings = choose(asked, accelerator)
    if accelerator.is_cuda:
        torch.cuda.set_device(accelerator.device)
    loaded = load(settings)
    dist.init_process_group(accelerator.backend)
    _groups.append(dist.group.WORLD)
    first = dist.get_rank() == 0
    sampler = node_sampler(accelerator)

    started = time.perf_counter()
    trainer = make(loaded, settings, accelerator)
    if trainer.zero is not None:  # by default its buckets follow the size of the model
        settings = replace(settings, bucket_mb=trainer.zero.layout.bucket_bytes / 2**20)
    accelerator.synchronize()
    build_ms = (time.perf_counter() - started) * 1000.0
    loop = Loop(trainer, loaded, settings, accelerator)
    keeper = Keeper(settings, trainer.zero, memory)
    setup: tuple[int, int] | None = None

    def begin() -> None:
        nonlocal setup
        if accelerator.is_cuda:
            setup = _peaks(accelerator.device)
            torch.cuda.reset_peak_memory_stats(accelerator.device)
        if sampler is not None:
            sampler.start()

    measured = loop.run(progress_path if first else None, keeper, begin)
    keeper.finish(measured)
    ended = datetime.now(UTC)
    samples = None if sampler is None else sampler.stop()
    settings = replace(settings, warmup=measured.warmup)

    # What follows the measured steps takes memory and sends bytes of its own: theirs are read first.
    rank = _rank(measured, accelerator, build_ms, setup)
    skipped_steps = trainer.skipped_steps
    traffic, phases = None, None
    if measured.step_ms:  # else a restart had nothing left to train, so there is nothing to measure
        traffic = _traffic(trainer, settings)
        rank = with_state(with_parts(rank, trainer, loop), trainer, loop)
        phases = measure_phases(trainer, loop.batches, accelerator, steps=settings.steps)
    by_rank = gather((rank, measured.loss, measured.count, samples))
    if first:
        ranks = [one for one, *_ in by_rank]
        _, losses, counts, _ = zip(*by_rank, strict=True)
        story = Story([], mean_over_ranks(losses, counts), measured.gradient_norm)
        if settings.elastic and settings.save is not None:
            story = Journal(path_of(settings.save)).story()
        loss: list[float | None] = list(story.loss)
        record = Record(
            id=uuid.uuid4().hex,
            cell=asked.key,
            status=Status.OK,
            sweep=sweep,
            created=ended.isoformat(timespec="seconds"),
            settings=settings,
            model=loaded.model,
            data=loaded.data,
            environment=look_around(accelerator),
            ranks=ranks,
            traffic=traffic,
            phases=phases,
            system=[one for *_, one in by_rank if one is not None],
            loss=loss,
            gradient_norm=list(story.gradient_norm),
            skipped_steps=skipped_steps,
            results=summarise(settings, loaded.model, ranks, loss) if measured.step_ms else None,
            checkpoints=keeper.done,
            parts=story.parts,
            batches_repeat_after=measured.batches_repeat_after,
        )
        write_record(record, record_path)
    plan: PlanBeside | None = None
    # Buffers and a second model: where memory ends here, the record of the measured steps is written.
    if measured.step_ms:
        if trace_path is not None and (traced := trace_step(trainer, loop.batches)) is not None:
            record = replace(record, trace=write_trace(traced, trace_path))
            write_record(record, record_path)
        timeline = measure_timeline(trainer, loop.batches, median(rank.step_ms))
        if first and trainer.zero is not None:
            name = torch.cuda.get_device_name(accelerator.device) if accelerator.is_cuda else None
            plan = PlanBeside(settings, loaded, trainer.zero.runtime.placement, trainer.zero.precision, name)
        bandwidth = measure_bandwidth(trainer)
        if first:
            record = replace(
                record, bandwidth=bandwidth, timeline=timeline, planned=None if plan is None else plan.planned
            )
            write_record(record, record_path)
    twin = measure_twin(trainer, loop.batches, loaded)
    if first and twin is not None:
        record = with_twin(record, twin)
        write_record(record if plan is None else replace(record, planned=plan.with_time(record)), record_path)
    dist.destroy_process_group()


def node_sampler(accelerator: Accelerator) -> Sampler | None:
    """A sampler of all devices of a node, on one rank per node. Collective."""
    used = [
        device for node, device in gather((_node(), device_id(accelerator))) if node == _node() and device
    ]
    return Sampler(devices=list(dict.fromkeys(used))) if os.environ["LOCAL_RANK"] == "0" else None


def _node() -> int:
    return int(os.environ.get("GROUP_RANK", "0"))


def _peaks(device: torch.device) -> tuple[int, int]:
    """The most bytes that torch has allocated and reserved since the peaks were reset."""
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def _rank(
    measured: Measured, accelerator: Accelerator, build_ms: float, setup: tuple[int, int] | None
) -> Rank:
    """This rank's figures, taken right after the measured steps; `setup` are the peaks before them, on CUDA."""
    device, allocated, reserved, memory = accelerator.device, None, None, None
    if setup is not None:
        allocated, reserved = _peaks(device)
        free, total = torch.cuda.mem_get_info(device)
        memory = DeviceMemory(*setup, measured.batch_bytes, total - free, total)
    return Rank(
        rank=dist.get_rank(),
        node=_node(),
        host=socket.gethostname(),
        pid=os.getpid(),
        device="cpu" if setup is None else torch.cuda.get_device_name(device),
        step_ms=measured.step_ms[measured.warmup :],
        warmup_ms=measured.step_ms[: measured.warmup],
        build_ms=build_ms,
        peak_host_bytes=peak_host_bytes(),
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_id=device_id(accelerator),
        device_memory=memory,
        window_ms=measured.window_ms,
        computed_ms=measured.computed_ms,
        waited_ms=measured.waited_ms,
    )


def with_parts(rank: Rank, trainer: Trainer, loop: Loop) -> Rank:
    """The rank with its part of the state and of a step's samples, where these are not the same for all ranks."""
    if trainer.zero is not None and (shares := trainer.zero.layout.shares):
        mesh = trainer.zero.runtime.collectives.mesh
        by_rank = {mesh.rank(position): share for position, share in enumerate(shares)}
        rank = replace(rank, share=by_rank[rank.rank])
    if (dealer := loop.dealer) is not None:
        rank = replace(rank, samples=dealer.samples, speed=dealer.pace.speeds[rank.rank])
    return rank


def with_state(rank: Rank, trainer: Trainer, loop: Loop) -> Rank:
    """The rank with zerokit's memory report, taken at the end of backward in one extra step."""
    zero = trainer.zero
    if zero is None:
        return rank
    trainer.differentiate(loop.next_batches())
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
    local = getattr(trainer, "local", None)
    route: str | None = "gloo, through host memory"
    if settings.every is not None and local is not None:
        measured, predicted = local.traffic(), local.predicted_traffic()
        formula = (
            f"in {settings.every} steps, between {local.islands} islands: (M−1)·2Ψ elements, and their way to all "
            "ranks of an island"
        )
    else:
        measured = trainer.zero.traffic()
        predicted = trainer.zero.predicted_traffic(micro_batches=settings.accumulate)
        route = trainer.zero.runtime.collectives.route if settings.world > 1 else None
        # Reduced once a step; stage 3 gathers parameters for the forward and the backward of each micro-batch,
        # less the units that it keeps.
        volume = 2 if settings.stage < 3 else 2 * settings.accumulate + 1
        formula = f"{'at most ' if settings.stage == 3 else ''}(N−1)·{volume}Ψ elements"
        formula = formula if settings.mesh is None else "the hops of both stages"
        if settings.optimizer == "muon" and settings.stage > 0:
            formula += ", and Muon's matrices to their owners and back"
    return Traffic(
        measured.elements,
        measured.bytes,
        measured.control_bytes,
        predicted.elements,
        predicted.bytes,
        formula,
        to_plain(measured.by_operation),
        route,
    )


def main(job: Path) -> None:
    """Run the job; an out-of-memory error becomes an `OutOfMemory` with advice."""
    content = json.loads(job.read_text())
    settings = from_plain(Settings, content["settings"])
    progress = job.parent / content["progress"] if content.get("progress") else None
    try:
        memory = Path(content["memory"]) if content.get("memory") else None
        traced = job.parent / content["trace"] if content.get("trace") else None
        run(settings, job.parent / content["record"], progress, content.get("sweep"), memory, traced)
    except (MemoryError, RuntimeError) as error:
        # Python, torch's CUDA allocator (a RuntimeError of its own) or its CPU allocator had no more to give.
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and "DefaultCPUAllocator" not in str(error):
            raise
        reason = _out_of_memory(settings, str(error))
        write_outcome(job, Outcome(Status.OUT_OF_MEMORY, reason))
        raise OutOfMemory(reason) from error


def _out_of_memory(settings: Settings, message: str) -> str:
    detail = message.strip().partition("\n")[0][:300] or "no detail given"
    parameters = describe(settings.model).parameters
    size = "" if parameters is None else f" ({parameters / 1e6:.1f} M parameters)"
    return (
        f"out of memory: {settings.model}{size}, {settings.engine} stage {settings.stage}, {settings.world} ranks, "
        f"batch {settings.batch_size}. A higher --stage or more ranks shard more of the state; a smaller --batch-size "
        f"or --seq-len needs less for activations. ({detail})"
    )
