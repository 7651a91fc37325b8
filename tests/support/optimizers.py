"""Optimizers by name, with options; and Lion, as a user would write it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Sign of interpolated momentum (arXiv:2302.06675), written the plain way: a loop, no fused option."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum: Tensor = state["momentum"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((momentum * beta1 + p.grad * (1 - beta1)).sign(), alpha=-group["lr"])
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.05}),
    "adam": (torch.optim.Adam, {"lr": 3e-3, "weight_decay": 0.01, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 2e-3}),
    "lion": (Lion, {"lr": 3e-4, "weight_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "adamax": (torch.optim.Adamax, {"lr": 2e-3}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 2e-3}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
}

#: Have `fused=True` on the CPU; an oracle must use the kernel that zerokit picks.
FUSED = {"adamw", "adam", "sgd", "momentum", "adagrad"}
