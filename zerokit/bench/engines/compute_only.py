"""Every rank trains alone, without communication: the floor, and the twin that communication is measured against.

Its losses and weights are each rank's own. In half precision it keeps fp32 parameters and autocasts, as DDP does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerokit.bench.engines.trainer import TorchTrainer, adamw, autocast, build_in_memory
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import Loaded


@dataclass(frozen=True, slots=True)
class Share:
    """Elements `start` to `stop` of a parameter, as a parameter of its own in the same memory."""

    whole: nn.Parameter
    part: nn.Parameter
    start: int
    stop: int

    @classmethod
    def of(cls, whole: nn.Parameter, rank: int, world: int) -> Share:
        """The rank-th part of `world`, as evenly as elements can be divided."""
        start, stop = (number * whole.numel() // world for number in (rank, rank + 1))
        return cls(whole, nn.Parameter(whole.detach().view(-1)[start:stop]), start, stop)

    def take_gradient(self) -> None:
        """Let the part see its elements of the whole gradient."""
        if self.whole.grad is not None:
            self.part.grad = self.whole.grad.reshape(-1)[self.start : self.stop]


class ComputeOnlyTrainer(TorchTrainer):
    """At stage 0 each rank steps the whole optimizer, at the others the share that it would own in a sharded one."""

    def __init__(self, model: nn.Module, settings: Settings, accelerator: Accelerator) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._shares: list[Share] = []
        if settings.stage > 0:
            self._shares = [Share.of(parameter, rank, world) for parameter in parameters]
            parameters = [share.part for share in self._shares]
        self._stepped = parameters
        self._scaler = torch.amp.GradScaler(accelerator.device.type, enabled=settings.precision == "fp16")
        self._skipped = 0
        optimizer = adamw(parameters, settings)
        super().__init__(model, optimizer, clip=settings.clip, autocast=autocast(settings, accelerator))

    @property
    def skipped_steps(self) -> int:
        return self._skipped

    @property
    def waited_s(self) -> float:
        return 0.0

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(self._scaler.scale(loss))

    def clip(self, largest: float) -> Tensor:
        self._scaler.unscale_(self.optimizer)
        return nn.utils.clip_grad_norm_(self._stepped, largest)

    def update(self) -> Tensor | None:
        for share in self._shares:
            share.take_gradient()
        norm = None if self._clip is None else self.clip(self._clip)
        self._scaler.step(self.optimizer)
        before = self._scaler.get_scale()
        self._scaler.update()
        self._skipped += self._scaler.get_scale() < before
        self.optimizer.zero_grad()
        self.model.zero_grad()
        return norm


def make(loaded: Loaded, settings: Settings, accelerator: Accelerator) -> ComputeOnlyTrainer:
    """Built in memory on every rank."""
    return ComputeOnlyTrainer(build_in_memory(loaded, accelerator), settings, accelerator)
