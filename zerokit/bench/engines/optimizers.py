"""The optimizers of a bench: torch's classes, each with its options and the parameters that it updates.

`adamw` is torch's fused AdamW. `muon` is `torch.optim.Muon` on the matrices of the blocks, and that AdamW on all else:
embeddings, heads, norms, biases. Muon's updates are scaled to the size of AdamW's, so one learning rate serves both
(arXiv:2502.16982, §2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerokit.bench.record.settings import Settings
from zerokit.errors import UsageError
from zerokit.planning.matrices import matrices_of, trainable


@dataclass(frozen=True, slots=True)
class Share:
    """What one class updates of a model.

    `whole`: whether it updates each parameter as a whole, so that a part of one cannot be updated by itself.
    """

    optimizer_class: type[Optimizer]
    options: Mapping[str, Any]
    parameters: list[nn.Parameter]
    whole: bool = False

    def build(self, parameters: Iterable[nn.Parameter] | None = None) -> Optimizer:
        """The optimizer over these parameters, or over its own."""
        make: Any = self.optimizer_class
        optimizer: Optimizer = make(
            list(self.parameters if parameters is None else parameters), **self.options
        )
        return optimizer


def shares_of(model: nn.Module, settings: Settings) -> list[Share]:
    """How `settings.optimizer` divides the model's trainable parameters among classes; none has no parameters.

    Raises `UsageError` for a model without matrices, or a torch without the class.
    """
    parameters = trainable(model.parameters())
    adamw = {"lr": settings.lr, "fused": True}
    if settings.optimizer == "adamw":
        return [Share(torch.optim.AdamW, adamw, parameters)]
    if not hasattr(torch.optim, "Muon"):
        raise UsageError(f"torch {torch.__version__} has no torch.optim.Muon: install torch 2.9 or later")
    matrices = matrices_of(model)
    if not matrices:
        raise UsageError(
            f"{settings.model} has no matrices that Muon could train: it trains the two-dimensional weights of blocks, "
            "the children of a model's ModuleLists; use --optimizer adamw"
        )
    muon = {"lr": settings.lr, "adjust_lr_fn": "match_rms_adamw"}
    taken = set(map(id, matrices))
    rest = [parameter for parameter in parameters if id(parameter) not in taken]
    shares = [Share(torch.optim.Muon, muon, matrices, whole=True), Share(torch.optim.AdamW, adamw, rest)]
    return [share for share in shares if share.parameters]
