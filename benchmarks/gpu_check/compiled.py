"""Compiled blocks: losses as without, what a step costs, and nothing compiled any more once steps are measured."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.gpu_check.cells import ROUNDS, STEPS
from benchmarks.gpu_check.engines import Live, free, ranks, row_of, undressed
from benchmarks.gpu_check.place import Place, found
from zerokit.bench.engines.trainer import Trainer
from zerokit.planning.matrices import outermost_blocks

_TOLERANCE = 2e-2
"""Relative, between losses in bf16: a compiler moves roundings."""
_PATIENCE = 2.0


def compile_blocks(place: Place) -> dict[str, Any]:
    """zerokit's stages 0 and 3 with blocks that inductor compiles; a host, which may lack a compiler, only traces."""
    model, backend = ("gpt-tiny", "aot_eager") if place.small else ("gpt2-124m", "inductor")
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    left_out: dict[str, str] = {}

    def dress(trainer: Trainer) -> Callable[[], int]:
        for block in outermost_blocks(trainer.model):
            block.compile(backend=backend)
        return lambda: 0

    longest_s = 0.0
    with ranks(place) as accelerator, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compilers say much
        for stage in (3, 0):
            row = row_of(model, "zerokit", stage)
            if place.left_s < _PATIENCE * longest_s:
                left_out[row.name] = "the part's time was nearly over"
                continue
            eager = _measure(Live(row, accelerator, undressed), place)
            free(accelerator)
            torch.compiler.reset()
            counters.clear()
            live = Live(row, accelerator, dress)
            longest_s = max(longest_s, live.seconds)
            compiled = counters["frames"]["ok"]
            given_up = counters["frames"]["total"] - compiled
            figures = _measure(live, place)
            again = counters["frames"]["ok"] - compiled
            rows.append(
                {
                    **figures,
                    "eager_ms": eager["median_ms"],
                    "eager_losses": eager["losses"],
                    "seconds_to_warm_up": live.seconds,
                    "frames": compiled,
                    "frames_given_up": given_up,
                    "frames_while_measured": again,
                    "graph_breaks": sum(counters["graph_break"].values()),
                }
            )
            if not compiled:
                faults.append(f"{row.name}: nothing was compiled")
            if given_up:
                faults.append(f"{row.name}: {given_up} frames were not compiled")
            if again:
                faults.append(f"{row.name}: {again} frames were compiled while steps were measured")
            pairs = zip(figures["losses"], eager["losses"], strict=True)
            if not all(math.isclose(one, other, rel_tol=_TOLERANCE) for one, other in pairs):
                faults.append(f"{row.name}: losses {figures['losses']}, and {eager['losses']} without")
            del live
            free(accelerator)
    summary = ", ".join(
        f"{one['row']} {one['median_ms']:.1f} ms, eager {one['eager_ms']:.1f}, {one['frames']} frames, "
        f"{one['frames_given_up']} given up"
        for one in rows
    )
    return found({"row": summary, "rows": rows, "left_out": left_out, "backend": backend}, faults)


def _measure(live: Live, place: Place) -> dict[str, Any]:
    for _ in range(ROUNDS):
        live.turn(1 if place.small else STEPS)
    return live.figures()
