"""A rank that is quick and one that dawdles: training must give the same bits."""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist

from tests.support.models import CASES
from tests.support.training import SMALL, Run, Trajectory, build_seeded, one_step, wrap


def train_at_two_paces(stage: int) -> list[list[str]]:
    """The bits of two trainings; in the second each rank dawdles in other places, forward and backward."""
    case, run = CASES["gpt"], Run(stage=stage, bucket_mb=SMALL)
    bits = []
    for slow in (False, True):
        model = build_seeded(case, 0)
        optimizer = wrap(model, case, run)
        trajectory = Trajectory()
        if slow:
            dawdle = torch.Generator().manual_seed(dist.get_rank())
            for module in model.modules():
                module.register_forward_pre_hook(partial(_dawdle, dawdle))
                module.register_forward_hook(partial(_dawdle_in_backward, dawdle))
        for step in range(3):
            one_step(model, optimizer, case, run, step, trajectory)
        bits.append(trajectory.bits())
    return bits


def _dawdle(generator: torch.Generator, *_: object) -> None:
    time.sleep(0.004 * float(torch.rand((), generator=generator) ** 4))


def _dawdle_in_backward(generator: torch.Generator, module: object, inputs: object, output: object) -> None:
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(partial(_dawdle, generator))
