"""One training run, described by a `Run`, and what is compared afterwards, a `Trajectory`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.support.distributed import run_ranks
from tests.support.machine import may_read
from tests.support.models import CASES, Batch, Case
from tests.support.optimizers import MIXES, OPTIMIZERS

#: MiB: no two neighbours ever join, so that small models have many units.
SMALL = 1e-6
#: MiB: everything that may join does.
LARGE = 64.0


@dataclass(frozen=True)
class Run:
    """How a model is trained. The engine decides which fields it needs: DDP has no stage."""

    stage: Any = 2
    mesh: tuple[int, int] | None = None
    steps: int = 20
    bucket_mb: float = SMALL
    optimizer: str = "adamw"
    #: Maximum norm; inf only measures; None does not call `clip_grad_norm_` at all.
    clip: float | None = None
    norm_type: float = 2.0
    #: Micro-batches a step, and whether all but the last run inside `accumulate()`.
    micro: int = 1
    accumulate: bool = False
    precision: Any = "fp32"
    #: `loss.backward()` instead of `optimizer.backward(loss)`.
    plain_backward: bool = False
    seed: int = 0


@dataclass
class Trajectory:
    """What one rank saw: its own losses, the global norms, and digests of weights and buffers at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: str = ""
    buffers: str = ""

    def bits(self) -> list[str]:
        """Everything except the buffers, exactly: equal lists mean equal bits."""
        return [value.hex() for value in [*self.losses, *self.norms]] + [self.weights]


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of names, dtypes, shapes and bits."""
    total = hashlib.sha256()
    for name, tensor in tensors:
        # A copy: a storage that NumPy shares can never be resized again, which stage 3 needs.
        flat = tensor.detach().clone(memory_format=torch.contiguous_format).flatten()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(flat.view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else b"")
    return total.hexdigest()


def mixed(name: str, *stages: Any) -> dict[str, Any]:
    """One of `stages` for each module of the case, by turns; modules that share a parameter have the same."""
    chosen: dict[str, Any] = {}
    known: dict[int, Any] = {}
    for path, module in CASES[name].build().named_modules(remove_duplicate=False):
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        shared = [known[each] for each in own if each in known]
        chosen[path or "*"] = stage = shared[0] if shared else stages[len(chosen) % len(stages)]
        known.update(dict.fromkeys(own, stage))
    return chosen


def exact(value: Tensor) -> str:
    """One number, to the last bit."""
    return float(value.detach()).hex()


def seed_host(seed: int) -> None:
    """`torch.manual_seed` also notes down a stack for each kind of device that is not there: 3 ms a step."""
    torch.default_generator.manual_seed(seed)


def build_seeded(case: Case, rank: int) -> nn.Module:
    """The model; every rank draws other weights, so that only rank 0's broadcast can make them equal."""
    seed_host(77 + rank)
    return case.build()


def draw(case: Case, run: Run, step: int, micro: int, rank: int) -> Batch:
    """A micro-batch; also seeds the global generator, which dropout reads."""
    seed_host(step * 1009 + micro * 101 + rank)
    return case.batch(run.seed, step * run.micro + micro, rank)


def wrap(model: nn.Module, case: Case, run: Run, **options: Any) -> zerokit.ZeroOptimizer:
    """The optimizer that `run` describes."""
    if run.optimizer in MIXES:
        cls: Any = MIXES[run.optimizer](model)
    else:
        cls, defaults = OPTIMIZERS[run.optimizer]
        options = {"params": case.groups(model) if case.groups else None} | defaults | options
    options = {"precision": run.precision, "bucket_mb": run.bucket_mb} | options
    with warnings.catch_warnings():
        if run.optimizer in MIXES:  # embeddings and one-row matrices, which a user should be told of
            warnings.simplefilter("ignore", zerokit.errors.ZerokitWarning)
        return zerokit.ZeroOptimizer(model, cls, stage=run.stage, mesh=run.mesh, **options)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole, as the user's `state_dict()` shows it; tied ones once."""
    state = model.state_dict()
    return {name: state[name] for name, _ in model.named_parameters()}


def one_step(
    model: nn.Module,
    optimizer: zerokit.ZeroOptimizer,
    case: Case,
    run: Run,
    step: int,
    trajectory: Trajectory,
) -> None:
    """The user's loop, once around."""
    for micro in range(run.micro):
        waiting: Any = contextlib.nullcontext()
        if run.accumulate and micro < run.micro - 1:
            waiting = optimizer.accumulate()
        with waiting:
            loss = case.loss(model, draw(case, run, step, micro, dist.get_rank())) / run.micro
            if run.plain_backward:
                torch.autograd.backward(loss)
            else:
                optimizer.backward(loss)
        trajectory.losses.append(loss.item())
    if run.clip is not None:
        trajectory.norms.append(optimizer.clip_grad_norm_(run.clip, run.norm_type).item())
    optimizer.step()
    optimizer.zero_grad()


def trained(
    name: str, run: Run, steps: int = 0, **options: Any
) -> tuple[Case, nn.Module, zerokit.ZeroOptimizer]:
    """A case, its model and its optimizer after so many steps."""
    case = CASES[name]
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run, **options)
    for step in range(steps):
        one_step(model, optimizer, case, run, step, Trajectory())
    return case, model, optimizer


def train_zero(name: str, run: Run, **options: Any) -> Trajectory:
    """zerokit on this rank."""
    case = CASES[name]
    model = build_seeded(case, dist.get_rank())
    optimizer = wrap(model, case, run, **options)
    trajectory = Trajectory()
    for step in range(run.steps):
        one_step(model, optimizer, case, run, step, trajectory)
    trajectory.weights = digest(whole_weights(model).items())
    trajectory.buffers = digest(model.named_buffers())
    return trajectory


def may_read_the_other(*, pinned: bool = False) -> bool:
    """On one of two ranks: whether it may read memory of the other, which CUDA has `pinned` or not."""
    cell = torch.tensor([float(dist.get_rank())], pin_memory=pinned)
    places = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(places, torch.tensor([os.getpid(), cell.data_ptr()]))
    other = 1 - dist.get_rank()
    allowed = may_read(*places[other].tolist(), numel=1) == [float(other)]
    dist.barrier()
    return allowed


@functools.cache
def _ranks_may_read() -> bool:
    return platform.machine() == "x86_64" and all(run_ranks(2, may_read_the_other))


def require_memory_route() -> None:
    """Skip the test where the kernel lets no rank read another's memory (Yama, some sandboxes), or not on x86-64."""
    if not _ranks_may_read():
        pytest.skip("ranks may not read each other's memory here")


def train_all(name: str, runs: dict[str, Run]) -> dict[str, Trajectory]:
    """zerokit, several times over; an error says in which run it happened."""
    results = {}
    for label, run in runs.items():
        try:
            results[label] = train_zero(name, run)
        except BaseException as error:
            error.add_note(f"while training {name} as {label!r}: {run}")
            raise
    return results
