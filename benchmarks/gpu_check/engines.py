"""Engines at work on one device: built, warmed up, and measured by turns."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu_check.floor import FloorTrainer
from benchmarks.gpu_check.place import Place
from benchmarks.gpu_check.step_trace import trace_step
from benchmarks.gpu_check.workloads import SIZES, load_sized, model_named, name_of
from zerokit.bench.catalogue.engines import label_of, state_of
from zerokit.bench.engines.trainer import Trainer, make
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.measure.clock import clock_of
from zerokit.bench.plans.subjects import PlanBeside, subject_of
from zerokit.bench.record.record import utilisation
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import Loaded
from zerokit.planning.trace import Traces

WARM_UP = 4
_BATCHES = 4
"""On the device, in turn."""


@dataclass(frozen=True)
class Row:
    """An engine on a model; `floor` is `FloorTrainer` in the place of the engine."""

    settings: Settings
    floor: bool = False

    @property
    def name(self) -> str:
        """As "zerokit 3 · states fp8"."""
        if self.floor:
            return "bf16 floor"
        return " · ".join(label_of(self.settings, () if self.settings.states == "device" else ("states",)))

    @property
    def state_bytes(self) -> int:
        """What it holds on the device, by the formula; the floor holds what zerokit's stage 0 does."""
        settings = self.settings
        engine = "zerokit" if self.floor else settings.engine
        state = state_of(engine, settings.stage, "bf16", home=settings.home)
        parameters = SIZES[name_of(settings.model)].config.parameters
        return state.bytes_of(parameters=parameters, world=settings.world)


def row_of(
    model: str, engine: str, stage: int = 0, *, world: int = 1, floor: bool = False, **options: Any
) -> Row:
    """A row on the model of `SIZES` with this name, in bf16 and with clipped gradients, for one of `world` ranks."""
    size = SIZES[model]
    settings = Settings(
        engine=engine,
        model=model_named(model),
        stage=stage,
        precision="bf16",
        batch_size=size.sequences,
        seq_len=size.length,
        nproc_per_node=world,
        lr=3e-4,
        twin=False,
        **options,
    )
    return Row(settings, floor)


@contextlib.contextmanager
def ranks(place: Place, world: int = 1) -> Iterator[Accelerator]:
    """A process group of this rank alone, NCCL's on a GPU and gloo's on a host, or rank 0 of a fake one."""
    on_gpu = place.device.type == "cuda"
    backend = "fake" if world > 1 else "nccl" if on_gpu else "gloo"
    if on_gpu:
        torch.cuda.set_device(place.device)
    with tempfile.TemporaryDirectory(prefix="zerokit-store-") as folder:
        store = FakeStore() if world > 1 else FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=world)
        try:
            yield Accelerator(place.device, backend)
        finally:
            dist.destroy_process_group()


_TRACES: dict[tuple[str, float | None, bool], Traces] = {}


def traces_of(loaded: Loaded, *, on_cuda: bool) -> Traces:
    """The model's traces for plans, made once for all of its rows: one of many layers takes seconds."""
    key = loaded.settings.model, loaded.settings.bucket_mb, on_cuda
    if key not in _TRACES:
        _TRACES[key] = Traces(subject_of(loaded), on_cuda=on_cuda, bucket_mb=key[1], exactly=True)
    return _TRACES[key]


def free(accelerator: Accelerator) -> None:
    """Give the memory of engines that are no more back to the device."""
    gc.collect()
    if accelerator.is_cuda:
        torch.cuda.empty_cache()


Dress = Callable[[Trainer], Callable[[], int]]
"""Prepares a trainer before its first step; what it returns gives the bytes that were received since it was called."""


def undressed(trainer: Trainer) -> Callable[[], int]:
    """Leaves the trainer as it is; one rank receives nothing."""
    return lambda: 0


class Live:
    """An engine that trains: construction builds it and warms it up, which other engines' memory must allow."""

    def __init__(self, row: Row, accelerator: Accelerator, dress: Dress = undressed) -> None:
        self.row, self._accelerator = row, accelerator
        self._loaded = load_sized(row.settings)
        began, before = time.perf_counter(), self._allocated()
        build = FloorTrainer if row.floor else make
        self._trainer = build(self._loaded, row.settings, accelerator)
        self._received = dress(self._trainer)
        self._batches = [
            [tuple(tensor.to(accelerator.device) for tensor in self._loaded.batch(at * 1000))]
            for at in range(_BATCHES)
        ]
        self._steps = 0
        self._losses: list[Tensor] = []
        self._ms: list[float] = []
        self._window_ms: list[float] = []
        self._returned_ms: list[float] = []
        self._process_ms: list[float] = []
        for _ in range(WARM_UP):
            accelerator.synchronize()
            last = time.perf_counter()
            self._step()
        accelerator.synchronize()
        self.step_s = time.perf_counter() - last
        self._memory = self._measure_memory(before)
        self.seconds = time.perf_counter() - began

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._accelerator.device) if self._accelerator.is_cuda else 0

    def _step(self) -> None:
        losses, _ = self._trainer.step(self._batches[self._steps % _BATCHES])
        self._losses += losses
        self._steps += 1

    def _measure_memory(self, before: int) -> dict[str, Any]:
        """The memory of a step, without that of other engines, which hold what was allocated `before`."""
        found: dict[str, Any] = {}
        device = self._accelerator.device
        if self._accelerator.is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self._step()
            self._accelerator.synchronize()
            unused, total = torch.cuda.mem_get_info(device)
            found = {
                "held_bytes": self._allocated() - before,
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) - before,
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
                "device_used_bytes": total - unused,
            }
        if (zero := self._trainer.zero) is not None:
            self._trainer.differentiate(self._batches[0])
            reported, predicted = zero.memory(), zero.predicted_memory()
            zero.zero_grad()
            name = torch.cuda.get_device_name(device) if self._accelerator.is_cuda else None
            traces = traces_of(self._loaded, on_cuda=name is not None)
            placement, precision = zero.runtime.placement, zero.precision
            plan = PlanBeside(self.row.settings, self._loaded, placement, precision, name, traces).planned
            found |= {
                "reported_bytes": reported.total,
                "predicted_bytes": predicted.total,
                "planned_peak_bytes": plan.total_bytes,
            }
        return found

    @property
    def transient_bytes(self) -> int:
        """What a step takes beyond what is held between steps; 0 on a host."""
        return int(self._memory.get("peak_allocated_bytes", 0) - self._memory.get("held_bytes", 0))

    def turn(self, steps: int) -> float:
        """Take so many measured steps; returns the median of their milliseconds."""
        clock = clock_of(self._accelerator)
        self._accelerator.synchronize()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            clock.begin()
            self._step()
            clock.end()
        self._returned_ms.append((time.perf_counter() - began) * 1e3 / steps)
        self._process_ms.append((time.process_time() - used) * 1e3 / steps)
        taken = clock.read()
        self._window_ms.append((time.perf_counter() - began) * 1e3 / steps)
        self._ms += taken
        return median(taken)

    def warnings_of_waits(self) -> list[str] | None:
        """What torch says of calls in one step for which the host waits for the device; None on a host."""
        if not self._accelerator.is_cuda:
            self._step()
            return None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        text = "called a synchronizing CUDA operation"
        return [f"{Path(one.filename).name}:{one.lineno}" for one in caught if text in str(one.message)]

    def trace(self, folder: Path, part: str) -> dict[str, Any]:
        """One step's trace, kept in a folder (`step_trace`)."""
        words = "".join(letter if letter.isalnum() else "-" for letter in f"{part}-{self.row.name}")
        path = folder / f"{words}-{name_of(self.row.settings.model)}.json.gz"
        self._received()
        found = trace_step(self._step, self._accelerator.device, path)
        return {**found, "received_bytes": self._received()}

    def figures(self) -> dict[str, Any]:
        """What the measured steps say, as JSON's values; the MFU is that of a known device."""
        settings, model = self.row.settings, self._loaded.model
        tokens = settings.batch_size * settings.seq_len
        ms = median(self._ms)
        accelerator = self._accelerator
        name = torch.cuda.get_device_name(accelerator.device) if accelerator.is_cuda else "CPU"
        used = utilisation(tokens / ms * 1e3, model.flops_per_unit, name, settings.precision)
        return {
            "row": self.row.name,
            "model": name_of(settings.model),
            "parameters": model.parameters,
            "ranks": settings.world,
            "tokens": tokens,
            "step_ms": self._ms,
            "median_ms": ms,
            "wall_ms": median(self._window_ms),
            "host_returned_ms": median(self._returned_ms),
            "host_process_ms": median(self._process_ms),
            "tokens_per_s": tokens / ms * 1e3,
            "mfu": None if used is None else asdict(used),
            "flops_formula": model.flops_convention,
            "skipped_steps": self._trainer.skipped_steps,
            "losses": torch.stack(self._losses).tolist(),
            **self._memory,
        }
