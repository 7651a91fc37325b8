"""Whether a backward pass brings gradients is known while it runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.recording import RecordingRoute, units_of_model
from zerokit.runtime.leaves import Leaves


class Asked:
    """A model and what `will_accumulate` says when the gradient of its output arrives."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.model[0].requires_grad_(False)
        _, self.storages = units_of_model(self.model, RecordingRoute(), 0)
        self.leaves = Leaves(self.storages)
        self.answers: list[bool] = []
        self.x = torch.ones(2, 4, requires_grad=True)

    def loss(self) -> Tensor:
        output: Tensor = self.model(self.x)
        output.register_hook(lambda gradient: self.answers.append(self.leaves.will_accumulate()))
        return output.square().mean()


WAYS: dict[str, tuple[Callable[[Asked], object], bool]] = {
    "backward": (lambda asked: asked.loss().backward(), True),
    "backward into some parameters": (
        lambda asked: asked.loss().backward(inputs=[asked.model[1].bias]),
        True,
    ),
    "backward into inputs": (lambda asked: asked.loss().backward(inputs=[asked.x]), False),
    "gradients of inputs": (lambda asked: torch.autograd.grad(asked.loss(), asked.x), False),
    "gradients of parameters": (
        lambda asked: torch.autograd.grad(asked.loss(), list(asked.model[1].parameters())),
        False,
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_pass_that_accumulates_is_told_from_one_that_does_not(name: str) -> None:
    asked = Asked()
    way, accumulates = WAYS[name]
    for _ in range(2):
        way(asked)
    assert asked.answers == [accumulates] * 2


def test_parameters_that_were_frozen_later_are_not_asked() -> None:
    asked = Asked()
    weight, bias = asked.model[1].weight, asked.model[1].bias
    (storage,) = [storage for storage in asked.storages if storage.unit.trainable]
    asked.loss().backward()
    for position, parameter in enumerate((weight, bias)):
        parameter.requires_grad_(False)
        storage.stopped.add(position)
    asked.loss().backward()
    assert asked.answers == [True, False]
