"""The compute-only twin of a cell: the same model and batches, with nothing communicated.

It is built beside the cell after all else has been measured, and both make steps in turn. What the cell's take longer
is what communication costs: what slows the machine down for a while slows both. Forward and backward of the twin are
the same work for every engine and stage, and so tell the machine's pace beside each cell.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import stdev
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zerokit.bench.catalogue.fit import available_bytes, state_of
from zerokit.bench.engines.trainer import make
from zerokit.bench.measure.clock import clock_of
from zerokit.bench.record import Twin
from zerokit.bench.record.statistics import Summary, slowest

if TYPE_CHECKING:
    from zerokit.bench.engines.trainer import Batch, Trainer
    from zerokit.bench.machine.accelerator import Accelerator
    from zerokit.bench.measure.phases import Batches
    from zerokit.bench.record.settings import Settings
    from zerokit.bench.workloads.build import Loaded

ENGINE = "compute-only"
FEWEST_PAIRS = 6
"""Of steps: those whose range is a 95 % interval of their median."""
_MOST_A_STEP = 40  # measured
_LONG_ENOUGH_S = 30.0
_EXACT_ENOUGH = 0.02
_WARMUP = 2
# Steps in a row of a device that runs behind its host: the first of them waits for the host.
_AHEAD = 5
Parts = tuple[float, float]
"""Milliseconds of forward with backward, and of the update."""
# Of the room there is: activations take some as well.
_MOST = 0.8


def twin_settings(settings: Settings) -> Settings | None:
    """The twin of this cell; None for one that has none: a single rank, a cell that communicates nothing itself, or an
    elastic one, whose world may change.

    The engines of stages 1 to 3 step a share of the optimizer on each rank, and so does their twin.
    """
    if not settings.twin or settings.elastic or settings.world == 1 or settings.engine == ENGINE:
        return None
    return replace(
        settings,
        engine=ENGINE,
        stage=min(settings.stage, 1),
        wire="own",
        bucket_mb=None,
        twin=False,
        save=None,
        save_every=None,
        background=False,
        resume=False,
    )


def measure_twin(
    trainer: Trainer, source: Batches, loaded: Loaded, settings: Settings, accelerator: Accelerator
) -> Twin | None:
    """Train the twin and the cell in turn; None where there is no twin, or no room for it. All ranks call it."""
    asked = twin_settings(settings)
    if asked is None or not _fits(asked, loaded.model.parameters, accelerator):
        return None
    twin = make(loaded, asked, accelerator)
    block = _AHEAD if clock_of(accelerator).runs_ahead else 1
    batches = [source.batches(step) for step in range(block)]
    _steps(twin, batches * _WARMUP, accelerator)
    own: list[float] = []
    parts: list[Parts] = []
    until = time.monotonic() + _LONG_ENOUGH_S
    for pair in range(0, max(FEWEST_PAIRS, _MOST_A_STEP * settings.steps), block):
        # Every second time in the other order: a steady drift weighs equally on both.
        for turn in (0, 1) if pair // block % 2 == 0 else (1, 0):
            if turn == 0:
                own += map(sum, _steps(trainer, batches, accelerator))
            else:
                parts += _steps(twin, batches, accelerator)
        if len(own) >= FEWEST_PAIRS and (
            _any_rank(time.monotonic() > until, accelerator)
            or not _any_rank(_inexact(own, parts), accelerator)
        ):
            break
    mine = (own, [sum(part) for part in parts], [compute for compute, _ in parts])
    gathered = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    own_ms, step_ms, pace_ms = (slowest(series) for series in zip(*gathered, strict=True))
    return Twin(asked.stage, step_ms, Summary.of(step_ms), own_ms, pace_ms)


def _steps(trainer: Trainer, batches: Sequence[list[Batch]], accelerator: Accelerator) -> list[Parts]:
    """The times of a step's parts; all ranks begin together."""
    clock = clock_of(accelerator)
    _any_rank(False, accelerator)
    for batch in batches:
        clock.begin()
        trainer.differentiate(batch)
        clock.end()
        clock.begin()
        trainer.update()
        clock.end()
    times = clock.read()
    return list(zip(times[::2], times[1::2], strict=True))


def _inexact(own: Sequence[float], parts: Sequence[Parts]) -> bool:
    """Whether the standard error of their mean ratio is large: a busy machine needs more pairs than an idle one."""
    ratios = [math.log(one / compute) for one, (compute, _) in zip(own, parts, strict=True)]
    return stdev(ratios) > _EXACT_ENOUGH * math.sqrt(len(ratios))


def _fits(asked: Settings, parameters: int, accelerator: Accelerator) -> bool:
    """Whether every rank has room for the twin's state. Its activations take the place of the cell's."""
    state = state_of(asked.engine, asked.stage, asked.precision or "fp32")
    needed = state.bytes_of(0, parameters=parameters, world=asked.world)
    if accelerator.device.type == "cuda":
        room: float = torch.cuda.mem_get_info(accelerator.device)[0]
    else:
        found = available_bytes()
        ranks_here = asked.nproc_per_node * int(os.environ.get("ZEROKIT_NODES_ON_MACHINE", "1"))
        room = math.inf if found is None else found / ranks_here
    return not _any_rank(needed > _MOST * room, accelerator)


def _any_rank(true: bool, accelerator: Accelerator) -> bool:
    """Whether any rank says so; all wait for each other."""
    found = torch.tensor([float(true)], device=accelerator.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())
