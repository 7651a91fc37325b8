"""Training on a device or, on a host, the device's way: one loop for both, which reads nothing before its end.

cpu      `NcclCollectives` over gloo, with side streams of `streams`
cuda     NCCL on the first GPU, on which this rank must be alone
"""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import zerokit
from tests.support.distributed import run_ranks
from tests.support.models import CASES, Batch, Case
from tests.support.streams import (
    LaggingCudaStream,
    LaggingStream,
    PromptStream,
    StreamMaker,
    device_way,
)
from tests.support.training import SMALL, Run, build_seeded, digest, exact, seed_host, whole_weights, wrap

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16", "fp16")
WIRE = zerokit.Precision(wire=torch.bfloat16)
"""Where gradients are rounded on their way, which takes more than one rank."""


@dataclass(frozen=True)
class Scene:
    """A model and a way to train it that has waits of its own."""

    case: str
    run: Run
    meta: bool = False


# MiB: a block of each model just fits, so that units are many and share the pool's buckets.
_GPT = Run(steps=3, clip=1.0, bucket_mb=0.02)
_STACK = Run(steps=4, clip=1.0, bucket_mb=0.0008)

SCENES = {
    "plain": Scene("gpt", _GPT),
    "buckets of their own": Scene("gpt", replace(_GPT, bucket_mb=SMALL)),
    "accumulation": Scene("gpt", replace(_GPT, micro=2, accumulate=True)),
    "repeated reductions": Scene("gpt", replace(_GPT, micro=2)),
    "activation checkpointing": Scene("gpt_checkpoint_each", _GPT),
    "meta": Scene("gpt", _GPT, meta=True),
    "units used again": Scene("unit_called_twice", _STACK),
    "tied": Scene("tied_blocks", _STACK),
    "frozen": Scene("lora", _STACK),
    "unused": Scene("unit_unused_on_one_rank", _STACK),
    "whole tensors": Scene("gpt", replace(_GPT, optimizer="muon")),
    "whole tensors, repeated reductions": Scene(
        "unit_unused_on_one_rank", replace(_STACK, optimizer="muon", micro=2)
    ),
}


class Training:
    """The user's loop, a step at a time. All batches lie on the device before it begins.

    Args:
        device: where the model and the batches lie.
        threaded: backward runs in a thread of its own, as on CUDA, where autograd has one a device.
        options: passed to `ZeroOptimizer`.
    """

    def __init__(self, scene: Scene, device: torch.device, *, threaded: bool = False, **options: Any) -> None:
        self._autograd = ThreadPoolExecutor(1) if threaded else None
        self.case, self.run, self.device = CASES[scene.case], scene.run, device
        self.model = _build(self.case, device, meta=scene.meta)
        self.optimizer = wrap(self.model, self.case, self.run, **options)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=7)
        rank = dist.get_rank()
        self.batches = [
            [
                _moved(self.case.batch(self.run.seed, step * self.run.micro + micro, rank), device)
                for micro in range(self.run.micro)
            ]
            for step in range(self.run.steps)
        ]
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []

    def differentiate(self, step: int, *, clear: bool = False) -> None:
        """Forward and backward of all micro-batches of a step; `clear` drops gradients in between."""
        for micro, batch in enumerate(self.batches[step]):
            waiting: Any = contextlib.nullcontext()
            if self.run.accumulate and micro < self.run.micro - 1:
                waiting = self.optimizer.accumulate()
            _seed(self.device, step * 1009 + micro * 101 + dist.get_rank())
            with waiting:
                loss = self.case.loss(self.model, batch) / self.run.micro
                if clear:
                    self.optimizer.zero_grad()
                self._backward(loss)
            self._losses.append(loss.detach())

    def _backward(self, loss: Tensor) -> None:
        if self._autograd is None:
            self.optimizer.backward(loss)
        else:
            self._autograd.submit(self.optimizer.backward, loss).result()

    def update(self) -> None:
        """The rest of a step."""
        if self.run.clip is not None:
            self._norms.append(self.optimizer.clip_grad_norm_(self.run.clip, self.run.norm_type))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def step(self, number: int) -> None:
        self.differentiate(number)
        self.update()

    def forget(self) -> None:
        """Drops the losses and norms so far: each is a block of the device's memory."""
        self._losses.clear()
        self._norms.clear()

    def losses(self) -> list[float]:
        return [float(loss) for loss in self._losses]

    def weights(self) -> str:
        """A digest of the whole weights; all ranks must ask."""
        return digest(whole_weights(self.model).items())

    def bits(self) -> list[str]:
        """Losses, norms and weights: equal lists mean equal bits."""
        return [exact(value) for value in [*self._losses, *self._norms]] + [self.weights()]


def train(scene: Scene, device: torch.device, **options: Any) -> list[str]:
    """The whole loop; returns its bits."""
    training = Training(scene, device, **options)
    for step in range(training.run.steps):
        training.step(step)
    return training.bits()


def at(scene: Scene, **changes: Any) -> Scene:
    """The same scene with another stage, precision or number of steps."""
    return replace(scene, run=replace(scene.run, **changes))


def _build(case: Case, device: torch.device, *, meta: bool) -> nn.Module:
    if meta:
        seed_host(77)
        with torch.device("meta"):
            return case.build()
    return build_seeded(case, dist.get_rank()).to(device)


def _moved(batch: Batch, device: torch.device) -> Batch:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _seed(device: torch.device, seed: int) -> None:
    seed_host(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


# ---- where it runs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""For tests that run on both."""


def run_on(device: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(device, *args)` on two ranks of this host, or on one that has the GPU for itself."""
    __tracebackhide__ = True
    return run_ranks(2 if device == "cpu" else 1, function, device, *args)


def placed(device: str) -> torch.device:
    """The device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


@contextlib.contextmanager
def prompt(device: str) -> Iterator[torch.device]:
    """Nothing comes late: what the other way is compared with."""
    with alone_on_gpu(device), contextlib.nullcontext() if device == "cuda" else device_way(PromptStream):
        yield placed(device)


@contextlib.contextmanager
def lagging(device: str, make_stream: StreamMaker | None = None) -> Iterator[torch.device]:
    """Results of collectives come late: who does not wait for them computes with nan."""
    late: StreamMaker = LaggingCudaStream if device == "cuda" else LaggingStream
    with alone_on_gpu(device), device_way(make_stream or late):
        yield placed(device)


@contextlib.contextmanager
def alone_on_gpu(device: str, *, bound: bool = False) -> Iterator[None]:
    """On "cuda" the default group is NCCL's, a GPU for each rank; inside another `alone_on_gpu` that one serves on.

    Its store must live as long as the group: communicators that are made later ask it for their keys.
    """
    if device != "cuda":
        yield
        return
    require_deterministic_kernels()
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world <= torch.cuda.device_count(), "NCCL takes one rank a GPU"
    torch.cuda.set_device(rank)
    if dist.get_backend() == "nccl":
        yield
        return
    with tempfile.TemporaryDirectory(prefix="zerokit-nccl-") as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        dist.destroy_process_group()
        dist.init_process_group(
            "nccl",
            init_method=f"file://{shared[0]}/store",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=20),
            device_id=torch.device("cuda", rank) if bound else None,
        )
        yield
        # Only here: after an error it would wait for ranks that are gone, longer than the watchdog does.
        dist.destroy_process_group()


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """On a GPU, whatever makes the host wait for it raises inside."""
    with warnings.catch_warnings(action="ignore"):  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def require_deterministic_kernels() -> None:
    """Before CUDA starts: kernels give the same bits in every run."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
