"""What training in bf16 costs at least: plain PyTorch with bf16 weights, and fp32 masters by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.bench.engines.optimizers import shares_of
from zerokit.bench.engines.trainer import Trainer
from zerokit.bench.workloads.build import Loaded


class FloorTrainer(Trainer):
    """One device alone: gradients are cast to fp32, clipped and stepped there, and weights written back in bf16."""

    autocasts = False

    def make_model(self, loaded: Loaded) -> nn.Module:
        """The model in bf16; the masters take its values before they are rounded."""
        model = self.build(loaded)
        self._weights = list(model.parameters())
        self._masters = [nn.Parameter(weight.detach().clone()) for weight in self._weights]
        self._gradients = [torch.empty_like(master) for master in self._masters]
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient
        return model.bfloat16()

    def make_optimizers(self) -> Sequence[Optimizer]:
        """The optimizer over the masters."""
        (share,) = shares_of(self.model, self.settings)
        return [share.build(self._masters)]

    @torch.no_grad()
    def update(self) -> Tensor | None:
        """Clip and step the masters, and write them back."""
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        torch._foreach_copy_(self._gradients, gradients)
        norm = self.clip()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        torch._foreach_copy_([*self._weights], [*self._masters])
        return norm

    def clip_to(self, largest: float) -> Tensor:
        """Scale the masters' gradients down to a norm of `largest`; returns their norm before."""
        return nn.utils.clip_grad_norm_(self._masters, largest)
