"""Turns of an optimizer's step: some tensors after others, as if all were stepped together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer


class Turns:
    """The turns of one step of an optimizer: each updates some tensors alone, and counts in groups go on by one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = [dict(group) for group in optimizer.param_groups]
        self._switches = {name: value for name, value in vars(optimizer).items() if type(value) is bool}

    def take(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Step the tensors that have these gradients; none is left behind."""
        with _having(gradients):
            self.step()

    def step(self) -> None:
        """Step the tensors that have gradients now."""
        self._begin()
        self._optimizer.step()

    def call(self, name: str, tensors: Collection[Tensor]) -> None:
        """Call another method of the optimizer, which sees these tensors alone."""
        self._begin()
        vars(self._optimizer).update(self._switches)
        every = [group["params"] for group in self._optimizer.param_groups]
        try:
            for group, own in zip(self._optimizer.param_groups, every, strict=True):
                group["params"] = [tensor for tensor in own if tensor in tensors]
            getattr(self._optimizer, name)()
        finally:
            for group, own in zip(self._optimizer.param_groups, every, strict=True):
                group["params"] = own

    def _begin(self) -> None:
        for group, before in zip(self._optimizer.param_groups, self._before, strict=True):
            for name in group.keys() - before.keys():
                del group[name]
            group.update(before)


@contextmanager
def _having(gradients: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    for tensor, gradient in gradients.items():
        tensor.grad = gradient
    try:
        yield
    finally:
        for tensor in gradients:
            tensor.grad = None
