"""The run without communication: every rank trains alone. It is the twin that communication is measured against.

Its losses and weights are each rank's own. In half precision it keeps fp32 parameters and autocasts, as DDP does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.bench.engines.optimizers import shares_of
from zerokit.bench.engines.trainer import Trainer
from zerokit.owners import deal, default_cost


class ComputeOnlyTrainer(Trainer):
    """At stage 0 each rank steps the whole optimizer, at other stages only the share of a sharded one.

    The share is the rank-th of N parts of every parameter, as even as elements can be divided. It is a parameter of its
    own in the same memory. Each parameter that is updated as a whole is one rank's, as zerokit deals them out.
    """

    def make_optimizers(self) -> Sequence[Optimizer]:
        self._scaler = torch.amp.GradScaler(
            self.accelerator.device.type, enabled=self.settings.precision == "fp16"
        )
        self._skipped = 0
        self._stepped: list[nn.Parameter] = []
        self._shares: list[tuple[nn.Parameter, slice, nn.Parameter]] = []
        optimizers = []
        for share in shares_of(self.model, self.settings):
            stepped = share.parameters
            if self.settings.stage > 0 and share.whole:
                owners = deal([default_cost(one.shape) for one in stepped], [1] * dist.get_world_size())
                dealt = zip(stepped, owners, strict=True)
                stepped = [one for one, owner in dealt if owner == dist.get_rank()]
            elif self.settings.stage > 0:
                stepped = [self._part(whole) for whole in stepped]
            self._stepped += stepped
            optimizers += [share.build(stepped)] if stepped else []
        return optimizers

    def _part(self, whole: nn.Parameter) -> nn.Parameter:
        """This rank's elements of a parameter."""
        rank, world = dist.get_rank(), dist.get_world_size()
        own = slice(rank * whole.numel() // world, (rank + 1) * whole.numel() // world)
        part = nn.Parameter(whole.detach().view(-1)[own])
        self._shares.append((whole, own, part))
        return part

    @property
    def skipped_steps(self) -> int:
        return self._skipped

    def backward(self, loss: Tensor) -> None:
        super().backward(self._scaler.scale(loss))

    def clip_to(self, largest: float) -> Tensor:
        for optimizer in self.optimizers:
            self._scaler.unscale_(optimizer)
        return nn.utils.clip_grad_norm_(self._stepped, largest)

    def update(self) -> Tensor | None:
        for whole, own, part in self._shares:
            if whole.grad is not None:
                part.grad = whole.grad.reshape(-1)[own]
        norm = self.clip()
        for optimizer in self.optimizers:
            self._scaler.step(optimizer)
        before = self._scaler.get_scale()
        self._scaler.update()
        self._skipped += self._scaler.get_scale() < before
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model.zero_grad()
        return norm
