"""The compute-only twin of a cell: the same model and batches without communication.

It is built beside the cell after all else has been measured, and both make steps in turn. What the cell's take longer
is what communication costs: what slows the machine down for a while slows both. Forward and backward of the twin are
the same work for every engine and stage, and so measure the machine's pace beside each cell.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import stdev
from typing import Any

import torch

from zerokit.available import available_bytes
from zerokit.bench.catalogue.engines import state_of
from zerokit.bench.engines.trainer import Batch, Trainer, make
from zerokit.bench.machine.accelerator import Accelerator, gather
from zerokit.bench.measure.clock import clock_of
from zerokit.bench.record.measured import Twin
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.statistics import FEWEST, Summary, slowest
from zerokit.bench.workloads.build import Loaded

ENGINE = "compute-only"
_MOST_A_STEP = 40  # measured
_LONG_ENOUGH_S = 30.0
_EXACT_ENOUGH = 0.02
_WARMUP = 2
# Steps in a row of a device that runs behind its host: the first of them waits for the host.
_AHEAD = 5
Parts = tuple[float, float]
"""Milliseconds of forward with backward, and of the update."""
_NOT_ITS = (
    *("wire", "mesh", "outer_stage", "every", "fragments", "delay", "bucket_mb", "states", "shares", "pace"),
    *("save", "save_every", "background", "resume", "copies", "copy_every", "copy_to"),
)
# A share of the free memory: activations take some as well.
_MOST = 0.8


def twin_settings(settings: Settings) -> Settings | None:
    """The twin of this cell; None for one that has none: a single rank, a cell that communicates nothing itself, or an
    elastic one, whose world may change.

    The engines of stages 1 to 3 step a share of the optimizer on each rank, and so does their twin. FSDP2's ranks
    orthogonalise all of Muon's matrices, each by itself: their twin steps the whole optimizer.
    """
    if not settings.twin or settings.elastic or settings.world == 1 or settings.engine == ENGINE:
        return None
    usual = Settings()
    without: dict[str, Any] = {name: getattr(usual, name) for name in _NOT_ITS}
    alike = settings.engine == "fsdp2" and settings.optimizer == "muon"
    stage = 0 if alike else min(settings.stage, 1)
    return replace(settings, engine=ENGINE, stage=stage, twin=False, **without)


def measure_twin(trainer: Trainer, batches: Callable[[int], list[Batch]], loaded: Loaded) -> Twin | None:
    """Train the twin and the cell in turn; None if there is no twin or no memory for it. Collective.

    `batches` gives the micro-batches of a step.
    """
    settings, accelerator = trainer.settings, trainer.accelerator
    alone = twin_settings(settings)
    if alone is None or not _fits(alone, loaded.model.parameters, accelerator):
        return None
    twin = make(loaded, alone, accelerator)
    steps = [batches(step) for step in range(_AHEAD if clock_of(accelerator).runs_ahead else 1)]
    _time(twin, steps * _WARMUP)
    own: list[float] = []
    parts: list[Parts] = []
    until = time.monotonic() + _LONG_ENOUGH_S
    for turn in range(math.ceil(max(FEWEST, _MOST_A_STEP * settings.steps) / len(steps))):
        # Every second time in the other order: a steady drift weighs equally on both.
        for trained in (trainer, twin) if turn % 2 == 0 else (twin, trainer):
            times = _time(trained, steps)
            if trained is twin:
                parts += times
            else:
                own += map(sum, times)
        if len(own) >= FEWEST:
            # A busy machine needs more pairs than an idle one: the standard error of their mean ratio is larger.
            ratios = [math.log(one / compute) for one, (compute, _) in zip(own, parts, strict=True)]
            exact = stdev(ratios) <= _EXACT_ENOUGH * math.sqrt(len(ratios))
            late, inexact = accelerator.maximum([time.monotonic() > until, not exact])
            if late or not inexact:
                break
    by_rank = gather((own, [sum(part) for part in parts], [compute for compute, _ in parts]))
    own_ms, step_ms, pace_ms = (slowest(series) for series in zip(*by_rank, strict=True))
    return Twin(alone.stage, step_ms, Summary.of(step_ms), own_ms, pace_ms)


def _time(trainer: Trainer, steps: Sequence[list[Batch]]) -> list[Parts]:
    """The times of each step's parts; all ranks begin together."""
    clock = clock_of(trainer.accelerator)
    trainer.accelerator.maximum([0.0])
    for batches in steps:
        clock.begin()
        trainer.differentiate(batches)
        clock.end()
        clock.begin()
        trainer.update()
        clock.end()
    times = clock.read()
    return list(zip(times[::2], times[1::2], strict=True))


def _fits(settings: Settings, parameters: int, accelerator: Accelerator) -> bool:
    """Whether every rank has room for the twin's state. Its activations need what the cell's have left free."""
    state = state_of(settings.engine, settings.stage, settings.precision or "fp32", settings.optimizer)
    needed = state.bytes_of(parameters=parameters, world=settings.world)
    if accelerator.is_cuda:
        room: float = torch.cuda.mem_get_info(accelerator.device)[0]
    else:
        ranks_here = settings.nproc_per_node * int(os.environ.get("ZEROKIT_NODES_ON_MACHINE", "1"))
        room = available_bytes() / ranks_here
    return not any(accelerator.maximum([needed > _MOST * room]))
