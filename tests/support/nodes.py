"""Nodes that are simulated by a directory each: which rank is on which, and small trainings that are saved there."""

from __future__ import annotations

import functools
import hashlib
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.crashes import Tree, Unsynced, read_tree
from zerokit import files
from zerokit.checkpoint.nodes.record import NODE_NAME

WIDTH, BATCH = 24, 12

AdamW: Any = functools.partial(torch.optim.AdamW, lr=0.01)


def place(root: str | Path, node: int) -> Path:
    """The run's directory of a node."""
    return Path(root, f"node-{node}", "run")


def spread(world: int, nodes: int) -> tuple[int, ...]:
    """The node of each rank, as evenly as it goes."""
    return tuple(rank * nodes // world for rank in range(world))


@dataclass(frozen=True)
class Kind:
    """A model and an optimizer."""

    classes: str = "adamw"
    precision: Any = "fp32"
    states: str = "device"
    frozen: str = "always"
    ema: bool = False
    base: bool = False
    """With a frozen parameter."""
    layers: int = 3


class Small(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(kind.layers))
        self.register_buffer("seen", torch.zeros(3))
        if kind.base:
            self.base = nn.Parameter(torch.linspace(0, 1, WIDTH * 5).view(5, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "base"):
            x = x + self.base.sum(0)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _classes(kind: Kind, model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if p.ndim == 2 and p.requires_grad]
    rest = [p for p in model.parameters() if p.ndim == 1]
    if kind.classes == "muon":
        return {functools.partial(torch.optim.Muon, lr=0.02): matrices, AdamW: rest}
    if kind.classes == "soap":
        from pytorch_optimizer import SOAP

        return {functools.partial(SOAP, lr=0.01, precondition_frequency=2): matrices, AdamW: rest}
    if kind.classes == "adafactor":
        return {functools.partial(torch.optim.Adafactor, lr=0.01): matrices, AdamW: rest}
    return AdamW


class Training:
    """A model that trains; all ranks draw the same numbers, and take their parts of each batch."""

    def __init__(self, kind: Kind = Kind(), stage: Any = 2, mesh: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = Small(kind)
        states = kind.states.format(rank=dist.get_rank())
        self.optimizer = zerokit.ZeroOptimizer(
            self.model,
            _classes(kind, self.model),
            stage=stage,
            mesh=mesh,
            precision=kind.precision,
            states=states,
            bucket_mb=1e-6,
            **options,
        )
        self.kind, self.ema = kind, zerokit.Ema(self.optimizer, 0.5) if kind.ema else None

    def step(self, number: int) -> float:
        torch.manual_seed(number)
        data = torch.randn(BATCH, WIDTH)
        rank, world = dist.get_rank(), dist.get_world_size()
        own = data[rank * BATCH // world : (rank + 1) * BATCH // world]
        with torch.no_grad():
            self.model.get_buffer("seen").add_(1)
        loss: torch.Tensor = (self.model(own) - own.roll(1, 1)).square().sum()
        self.optimizer.backward(loss, count=len(own))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update()
        return float(loss.detach())

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.step(number)

    def bits(self, scratch: Path, step: int) -> str:
        """A hash of the whole state, as an ordinary save of that step in `scratch` has it; the same on all ranks."""
        with files.replaced(Unsynced()):
            saved = zerokit.save(scratch, self.optimizer, step=step, overwrite=True)
        total = hashlib.sha256(repr(sorted(read_tree(saved).items())).encode())
        dist.barrier()
        return total.hexdigest()

    def save(self, run: Path, step: int, **options: Any) -> Path:
        done: Any = zerokit.save(
            run, self.optimizer, step=step, **{"frozen": self.kind.frozen, "extra": {"step": step}, **options}
        )
        return done if isinstance(done, Path) else done.wait()

    def load(self, places: Any, **options: Any) -> tuple[Any, list[str]]:
        """What `load` returns, and what it warns of on this rank."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            extra = zerokit.load(places, self.optimizer, **options)
        return extra, [str(one.message) for one in caught if issubclass(one.category, zerokit.ZerokitWarning)]


def warned(task: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a task returns, and what zerokit warns of meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = task()
    return found, [str(one.message) for one in caught if issubclass(one.category, zerokit.ZerokitWarning)]


def joined(steps: Sequence[Path]) -> Tree:
    """The files of a step's directories on all nodes, without their records; equal names have equal contents."""
    found: Tree = {}
    for step in steps:
        for name, content in read_tree(step).items():
            if name != NODE_NAME:
                assert found.setdefault(name, content) == content, (
                    f"{step / name} differs from another node's"
                )
    return found
