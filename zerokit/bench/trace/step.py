"""The extra step that a timeline shows."""

from __future__ import annotations

import socket
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerokit.bench.machine.accelerator import gather
from zerokit.bench.trace.events import RankSpans, trace
from zerokit.bench.trace.modules import ModuleHooks
from zerokit.bench.trace.recorder import Recorder
from zerokit.bench.trace.spans import DeviceMarks, HostMarks, Marks, now
from zerokit.offsets import Offset, by_machine, measure_offsets
from zerokit.process import Process

if TYPE_CHECKING:
    from zerokit.bench.engines.trainer import Trainer
    from zerokit.bench.measure.clock import Batches
    from zerokit.layout import Unit
    from zerokit.runtime import ZeroOptimizer

ROUNDS = 50
"""How often clocks are compared: some 20 ms, for the least uncertain comparison."""


def trace_step(trainer: Trainer, batches: Batches) -> dict[str, Any] | None:
    """The trace of the second of two extra steps, on rank 0; None on other ranks. Collective.

    For engines with zerokit's optimizer. Raises `ValueError` for others.
    """
    zero, accelerator = trainer.zero, trainer.accelerator
    if zero is None:
        raise ValueError("only zerokit's engine has a timeline")
    offset = _offset()
    host: Marks = HostMarks()
    device = DeviceMarks(lambda: torch.cuda.Event(enable_timing=True)) if accelerator.is_cuda else None
    compute = device or host
    collectives, walk = zero.runtime.collectives, zero.runtime.walk
    names = [_name(unit) for unit in zero.layout.units]
    recorder = Recorder(names, host, compute, compute if collectives.runs_ahead else host)
    hooks = ModuleHooks(trainer.model, walk.announcers, recorder)
    with collectives.observed(recorder), hooks.on():
        trainer.step(batches(0))
        ready = batches(1)
        accelerator.synchronize()
        accelerator.maximum([0.0])  # ranks begin together
        handle = zero.register_step_pre_hook(recorder.update)
        with recorder.step():
            trainer.step(ready, recorder.phase)
        handle.remove()
    accelerator.synchronize()
    if device is not None:
        offset = Offset(offset.seconds, offset.uncertainty_s + device.uncertainty_s)
    name = "cpu" if device is None else torch.cuda.get_device_name(accelerator.device)
    mine = RankSpans(dist.get_rank(), socket.gethostname(), name, offset, recorder.spans())
    ranks = gather(mine)
    return trace(ranks, _about(zero, trainer)) if dist.get_rank() == 0 else None


def _name(unit: Unit) -> str:
    """A unit's modules, or its parameters where it is of the rest."""
    if not unit.scopes:
        return unit.name
    return unit.scopes[0] if len(unit.scopes) == 1 else f"{unit.scopes[0]} .. {unit.scopes[-1]}"


def _about(zero: ZeroOptimizer, trainer: Trainer) -> dict[str, Any]:
    settings, traffic = trainer.settings, zero.traffic()
    return {
        "model": settings.model,
        "stage": settings.stage,
        "mesh": settings.mesh,
        "precision": settings.precision,
        "traffic": {name: asdict(operation) for name, operation in traffic.by_operation.items()},
    }


def _offset() -> Offset:
    """How far this rank's clock is ahead of rank 0's."""
    world = dist.group.WORLD
    assert world is not None
    group = world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    offsets = by_machine(measure_offsets(group, now, ROUNDS), gather(Process.current().boot))
    if group is not world:
        dist.destroy_process_group(group)
    return offsets[dist.get_rank()]
