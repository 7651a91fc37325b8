"""Shares that change between steps: the same bits, traffic and memory as predicted, and what is refused."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

import zerokit
from tests.support.distributed import run_ranks
from tests.support.models import CASES
from tests.support.training import (
    SMALL,
    Run,
    Trajectory,
    build_seeded,
    digest,
    one_step,
    whole_weights,
    wrap,
)
from zerokit.runtime.collectives.host.node import SWITCH


def _shares(draw: random.Random, world: int) -> tuple[int, ...] | None:
    """Shares of all ranks, some of them 0; None for equal ones."""
    chosen = tuple(draw.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(world))
    return chosen if any(chosen) else None


def _train(
    name: str, run: Run, recuts: int, options: dict[str, Any], average: bool = False
) -> tuple[list[str], str]:
    """Train, with so many recuts before each step; what came out, and the average."""
    case = CASES[name]
    model = build_seeded(case, dist.get_rank())
    optimizer = wrap(model, case, run, **options)
    ema = zerokit.Ema(optimizer, decay=0.5) if average else None
    draw, trajectory = random.Random(5), Trajectory()
    for step in range(run.steps):
        for _ in range(recuts):
            optimizer.recut(_shares(draw, dist.get_world_size()))
            if step > 1:
                held, predicted = optimizer.memory(), optimizer.predicted_memory()
                assert held.optimizer == predicted.optimizer
                assert (held.parameters, held.frozen) == (predicted.parameters, predicted.frozen)
        one_step(model, optimizer, case, run, step, trajectory)
        if ema is not None:
            ema.update()
    trajectory.weights = digest(whole_weights(model).items())
    averaged = ""
    if ema is not None:
        with ema.applied():
            averaged = digest(whole_weights(model).items())
    return trajectory.bits(), averaged


def _both(name: str, run: Run, recuts: int, switch: str, average: bool, options: dict[str, Any]) -> None:
    os.environ[SWITCH] = switch
    recut = _train(name, run, recuts, options, average)
    assert recut == _train(name, run, 0, options, average)


ADAMW = Run(clip=0.5, steps=10)


@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize(
    ("name", "world", "run"),
    [
        ("gpt", 1, ADAMW),
        ("gpt", 2, replace(ADAMW, stage=0)),
        ("gpt", 3, replace(ADAMW, stage=1, micro=2, accumulate=True)),
        ("gpt", 3, replace(ADAMW, stage=2, precision="bf16")),
        ("gpt", 3, replace(ADAMW, stage=3)),
        ("gpt", 4, replace(ADAMW, stage=(1, 3), mesh=(2, 2), precision="bf16")),
        ("gpt", 4, replace(ADAMW, stage=(0, 3), mesh=(2, 2))),
        ("lora", 3, replace(ADAMW, stage=3, precision="bf16")),
        ("tied_blocks", 2, replace(ADAMW, stage=3, precision="fp16")),
        ("tiny_parameters", 3, replace(ADAMW, stage=2, optimizer="sgd")),
    ],
)
def test_fifty_recuts_change_no_bit(name: str, world: int, run: Run, switch: str) -> None:
    """At random shares, five before each of ten steps, with an average of the weights."""
    run_ranks(world, _both, name, replace(run, bucket_mb=SMALL), 5, switch, True, {})


@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize(
    ("world", "run", "states"),
    [
        (3, Run(optimizer="muon", stage=2), "device"),
        (2, Run(optimizer="muon", stage=0), "device"),
        (4, Run(optimizer="muon", stage=(1, 3), mesh=(2, 2), precision="bf16"), "fp8"),
        (3, Run(optimizer="adafactor", stage=3, precision="bf16"), "device"),
        (2, Run(optimizer="soap", stage=3), "disk"),
        (3, Run(optimizer="soap", stage=1), "device"),
        (3, Run(optimizer="adam", stage=3), "fp8"),
        (3, Run(optimizer="adamw", stage=2, precision="bf16"), "disk"),
        (4, Run(optimizer="adamw", stage=(0, 2), mesh=(2, 2), precision="bf16"), "disk"),
        (3, Run(optimizer="nadam", stage=3), "device"),
    ],
)
def test_whole_tensors_and_states_elsewhere_move_as_they_are(
    world: int, run: Run, states: str, switch: str, tmp_path: Path
) -> None:
    options = {"states": str(tmp_path) if states == "disk" else states}
    run_ranks(world, _both, "gpt", replace(run, steps=5, bucket_mb=SMALL), 3, switch, True, options)
