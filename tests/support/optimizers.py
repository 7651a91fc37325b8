"""Optimizers by name, with options; Lion, as a user would write it; and several classes that train one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


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

Classes = dict[Any, list[dict[str, Any]]]
"""What `ZeroOptimizer` takes in the place of a class: the groups of each."""


def are_embeddings(model: nn.Module) -> set[Tensor]:
    """The weights of embeddings, which are also those of tied heads."""
    return {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}


def _muon(model: nn.Module) -> Classes:
    """Hidden matrices for Muon, all others for AdamW."""
    embeddings = are_embeddings(model)
    hidden = [p for p in model.parameters() if p.ndim == 2 and min(p.shape) > 1 and p not in embeddings]
    rest = [p for p in model.parameters() if all(p is not other for other in hidden)]
    adamw = {torch.optim.AdamW: [{"params": rest, "lr": 3e-3, "weight_decay": 0.05}]}
    return ({torch.optim.Muon: [{"params": hidden, "lr": 0.02}]} if hidden else {}) | adamw


def _adafactor(model: nn.Module) -> Classes:
    """All for torch's class but what it cannot step, empty parameters, which are for SGD."""
    empty = [p for p in model.parameters() if p.numel() == 0]
    full = [p for p in model.parameters() if p.numel()]
    rest = {torch.optim.SGD: [{"params": empty, "lr": 0.1}]} if empty else {}
    return {torch.optim.Adafactor: [{"params": full, "lr": 0.01, "weight_decay": 0.01}]} | rest


def _by_ranks(model: nn.Module, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Matrices and what has more dimensions, with `options`, and the rest."""
    groups: list[list[nn.Parameter]] = [[], []]
    for parameter in model.parameters():
        groups[parameter.ndim < 2].append(parameter)
    return [{"params": groups[0], **options}, {"params": groups[1]}]


def _soap(model: nn.Module) -> Classes:
    from pytorch_optimizer import SOAP

    options = {"lr": 0.01, "precondition_frequency": 3}
    return {SOAP: _by_ranks(model, options)}


def _lamb(model: nn.Module) -> Classes:
    from pytorch_optimizer import Lamb

    return {Lamb: _by_ranks(model, {"lr": 0.01, "weight_decay": 0.01})}


MIXES: dict[str, Callable[[nn.Module], Classes]] = {
    "muon": _muon,
    "adafactor": _adafactor,
    "soap": _soap,
    "lamb": _lamb,
}
"""Classes that look at whole tensors, with their parameters of a model. The package of two of them comes late: GPU
machines may lack it."""
