"""The run without communication: every rank trains alone. It is the twin that communication is measured against.

Its losses and weights are each rank's own. In half precision it keeps fp32 parameters and autocasts, as DDP does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.bench.engines.trainer import Trainer, adamw, trainable


class ComputeOnlyTrainer(Trainer):
    """At stage 0 each rank steps the whole optimizer, at other stages only the share of a sharded one.

    The share is the rank-th of N parts of every parameter, as even as elements can be divided. It is a parameter of its
    own in the same memory.
    """

    def make_optimizer(self) -> Optimizer:
        self._scaler = torch.amp.GradScaler(
            self.accelerator.device.type, enabled=self.settings.precision == "fp16"
        )
        self._skipped = 0
        self._stepped = trainable(self.model.parameters())
        self._shares: list[tuple[nn.Parameter, slice, nn.Parameter]] = []
        if self.settings.stage > 0:
            rank, world = dist.get_rank(), dist.get_world_size()
            for whole in self._stepped:
                own = slice(rank * whole.numel() // world, (rank + 1) * whole.numel() // world)
                self._shares.append((whole, own, nn.Parameter(whole.detach().view(-1)[own])))
            self._stepped = [part for _, _, part in self._shares]
        return adamw(self._stepped, self.settings)

    @property
    def skipped_steps(self) -> int:
        return self._skipped

    def backward(self, loss: Tensor) -> None:
        super().backward(self._scaler.scale(loss))

    def clip_to(self, largest: float) -> Tensor:
        self._scaler.unscale_(self.optimizer)
        return nn.utils.clip_grad_norm_(self._stepped, largest)

    def update(self) -> Tensor | None:
        for whole, own, part in self._shares:
            if whole.grad is not None:
                part.grad = whole.grad.reshape(-1)[own]
        norm = self.clip()
        self._scaler.step(self.optimizer)
        before = self._scaler.get_scale()
        self._scaler.update()
        self._skipped += self._scaler.get_scale() < before
        self.optimizer.zero_grad()
        self.model.zero_grad()
        return norm
