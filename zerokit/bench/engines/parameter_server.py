"""A parameter server, as a baseline: rank 0 owns the optimizer, the others push gradients to it and pull parameters.

    rank 1, 2, …   backward ── gradients ──► rank 0: sum, clip, step ── parameters ──► rank 1, 2, …

One flat message each way and rank, point to point. Rank 0's wire carries 2·(N−1)·Ψ elements a step, which is what
collectives spread over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.bench.engines.optimizers import shares_of
from zerokit.bench.engines.trainer import Trainer

SERVER = 0


class ParameterServerTrainer(Trainer):
    """The engine; parameters and gradients are views of one flat tensor each and are sent without a copy.

    The model is built on every rank; rank 0's weights are the ones that all begin with.
    """

    def make_optimizers(self) -> Sequence[Optimizer]:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        (share,) = shares_of(self.model, self.settings)
        parameters = share.parameters
        sizes = [parameter.numel() for parameter in parameters]
        self._flat = nn.Parameter(torch.empty(sum(sizes), device=self.accelerator.device))
        self._flat.grad = self._gradients = torch.zeros_like(self._flat)
        views = zip(self._flat.detach().split(sizes), self._gradients.split(sizes), strict=True)
        for parameter, (values, gradients) in zip(parameters, views, strict=True):
            view = values.view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            # The backward pass adds to a gradient that is there already, in accelerator.
            parameter.grad = gradients.view(parameter.shape)
        self._arriving = torch.empty_like(self._gradients) if self._rank == SERVER < self._world - 1 else None
        self._pull()
        return [share.build([self._flat])]

    def clip_to(self, largest: float) -> Tensor:
        return nn.utils.clip_grad_norm_([self._flat], largest)

    def update(self) -> Tensor | None:
        """Update the parameters; only the server knows the norm."""
        self._push()
        norm = None
        if self._rank == SERVER:
            norm = self.clip()
            for optimizer in self.optimizers:
                optimizer.step()
        self._pull()
        self._gradients.zero_()
        return norm

    def _push(self) -> None:
        if self._rank != SERVER:
            dist.send(self._gradients, SERVER)
        elif self._arriving is not None:
            for peer in range(1, self._world):
                dist.recv(self._arriving, peer)
                self._gradients.add_(self._arriving)
            self._gradients.div_(self._world)

    def _pull(self) -> None:
        flat = self._flat.detach()
        if self._rank != SERVER:
            dist.recv(flat, SERVER)
            return
        for work in [dist.isend(flat, peer) for peer in range(1, self._world)]:
            if work is not None:
                work.wait()
