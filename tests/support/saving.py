"""A small training that is saved, and what is asked of its run afterwards."""

from __future__ import annotations

import datetime
import functools
import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerokit
from zerokit import files
from zerokit.checkpoint.run import find_step


def small_optimizer(
    width: int = 12, *, timeout: float | None = None, base: bool = False, whole: bool = False
) -> zerokit.ZeroOptimizer:
    """One that has trained a step; with `base`, beside a frozen parameter that changes with every step.

    With `whole` the matrix is updated whole, by Adafactor, whose states are not cut.
    """
    model = nn.Linear(20, width)
    if base:
        model.base = nn.Parameter(torch.zeros(70, 3), requires_grad=False)
    adamw: Any = functools.partial(torch.optim.AdamW, lr=0.1)
    optimizer = zerokit.ZeroOptimizer(
        model,
        {torch.optim.Adafactor: [model.weight], adamw: [model.bias]} if whole else adamw,
        stage=2,
        precision="fp32",
        timeout=None if timeout is None else datetime.timedelta(seconds=timeout),
    )
    train(optimizer)
    return optimizer


def train(optimizer: zerokit.ZeroOptimizer) -> None:
    model = optimizer.runtime.model
    optimizer.backward(model(torch.ones(2, 20)).square().sum())
    optimizer.step()
    optimizer.zero_grad()
    if isinstance(base := getattr(model, "base", None), nn.Parameter):
        with optimizer.gathered(), torch.no_grad():
            base.add_(1)


def newest_step(run: Path) -> tuple[int, int] | None:
    """The step that a load would take, and its manifest's checksum; all of it is proven."""
    try:
        found = find_step(run)
    except zerokit.CheckpointError as error:
        if "not a checkpoint" in str(error) or "does not exist" in str(error):
            return None
        raise
    report = zerokit.verify(run)
    assert report.intact, report
    assert report.path == found.path
    assert found.manifest is not None
    return found.manifest[0].step, found.manifest[1]


@dataclass(frozen=True)
class How:
    """How a step is saved."""

    overwrite: bool = False
    exchanges: bool = True
    """Whether directories can change places on this file system."""
    blocking: bool = True
    keep_last: int | None = None
    frozen: str = "always"

    def save(self, run: Path, optimizer: zerokit.ZeroOptimizer, step: int) -> None:
        done: Any = zerokit.save(  # type: ignore[call-overload]
            run,
            optimizer,
            step=step,
            overwrite=self.overwrite,
            keep_last=self.keep_last,
            blocking=self.blocking,
            frozen=self.frozen,
        )
        if not self.blocking:
            done.wait()


def in_turn(works: Sequence[Callable[[str], Any]], folder: str, *, apart: bool = True) -> list[Any]:
    """Each work of this rank, `apart` in a folder of its own; an error says in which it happened.

    Optimizers end between the works: the end of one that has made a step waits for the other ranks.
    """
    found = []
    gc.disable()
    for work in works:
        try:
            found.append(work(f"{folder}/{work.__name__}" if apart else folder))
            dist.barrier()
            gc.collect()
            dist.barrier()
        except BaseException as error:
            error.add_note(f"in {work.__name__}")
            raise
    return found


class Held(files.System):
    """A disk that takes nothing before `open` is set."""

    def __init__(self) -> None:
        self.open, self.asked = threading.Event(), threading.Event()

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.asked.set()
        self.open.wait()
        return super().write(fd, buffers, offset)
