"""Which kernel an optimizer is asked for, and what a trial finds out about its states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import zerokit
from zerokit.runtime.admission import choose_kernel, probe

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Picky(torch.optim.SGD):
    """Takes `fused` and refuses it in its first step, in the way that it is told to."""

    error: type[Exception] = RuntimeError
    tried: list[torch.Tensor]

    def __init__(self, params: Any, lr: float = 0.1, *, fused: bool | None = None) -> None:
        super().__init__(params, lr=lr)
        self.wanted = fused

    def step(self, closure: Any = None) -> Any:
        type(self).tried = [tensor for group in self.param_groups for tensor in group["params"]]
        if self.wanted:
            raise self.error("there is no fused kernel for this device")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError, NotImplementedError])
def test_a_kernel_that_fails_on_the_device_is_not_asked_for(error: type[Exception], device: str) -> None:
    Picky.error = error
    options = {"lr": 0.5}
    assert choose_kernel(Picky, options, torch.device(device), torch.bfloat16) == {"lr": 0.5}
    (tried,) = Picky.tried
    assert (tried.device.type, tried.dtype) == (device, torch.bfloat16)


def test_another_error_is_not_taken_for_a_missing_kernel() -> None:
    Picky.error = KeyError
    with pytest.raises(KeyError):
        choose_kernel(Picky, {}, CPU, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_a_kernel_that_succeeds_is_asked_for(cls: type[Optimizer], device: str) -> None:
    options: dict[str, Any] = {"lr": 0.5}
    chosen = choose_kernel(cls, options, torch.device(device), torch.float32)
    assert chosen == {"lr": 0.5, "fused": True}
    assert options == {"lr": 0.5}


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        *((torch.optim.AdamW, {wish: True}) for wish in ("foreach", "differentiable", "capturable")),
        (torch.optim.AdamW, {"fused": False}),
        (torch.optim.AdamW, {"fused": None}),
        (torch.optim.RMSprop, {"lr": 0.1}),  # has no fused kernel
    ],
)
def test_a_wish_of_the_users_stands(cls: type[Optimizer], options: dict[str, Any]) -> None:
    assert choose_kernel(cls, options, CPU, torch.float32) is options


@pytest.mark.parametrize(
    ("cls", "options", "master", "kinds", "element_bytes"),
    [
        (torch.optim.AdamW, {}, torch.float32, {"exp_avg", "exp_avg_sq"}, 8),
        (torch.optim.AdamW, {}, torch.bfloat16, {"exp_avg", "exp_avg_sq"}, 4),
        (torch.optim.SGD, {}, torch.float32, set(), 0),
        (torch.optim.SGD, {"momentum": 0.9}, torch.float32, {"momentum_buffer"}, 4),
        (torch.optim.Adagrad, {}, torch.float32, {"sum"}, 4),
    ],
)
def test_states_are_found(
    cls: type[Optimizer], options: dict[str, Any], master: torch.dtype, kinds: set[str], element_bytes: int
) -> None:
    states = probe(cls, {"lr": 0.1, **options}, master)
    assert states.kinds == kinds
    assert states.element_bytes == element_bytes
    assert states.scalar_bytes == (0 if cls is torch.optim.SGD else 4)


def test_an_optimizer_that_cannot_be_stepped_plainly_is_refused_with_its_own_words() -> None:
    with pytest.raises(zerokit.UnsupportedOptimizer, match=r"LBFGS.*closure"):
        probe(torch.optim.LBFGS, {}, torch.float32)
