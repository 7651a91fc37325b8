"""Parameters that answer for themselves: what they let pass, what they refuse, and what they turn back into."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerokit
from tests.support.on_ranks import on_ranks
from zerokit.placement import stage_of
from zerokit.runtime.guard import Guarded, HeldGradient


def build(stage: int) -> tuple[Any, zerokit.ZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return model, zerokit.ZeroOptimizer(
        model, torch.optim.SGD, stage=stage_of(stage), precision="fp32", bucket_mb=5e-4, lr=0.1
    )


def step(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    optimizer.backward(model(torch.ones(2, 64)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2, (0, 1, 2, 3))
def test_the_model_computes_with_plain_parameters(stage: int) -> None:
    """In forward, and in hooks of modules, parameters have their own class: compilers and kernels see nothing new."""
    model, optimizer = build(stage)
    seen: list[type] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda layer, _: seen.append(type(layer.weight)))
    step(model, optimizer)
    step(model, optimizer)
    assert seen == [nn.Parameter] * 4


@on_ranks(2)
def test_a_divided_parameter_is_not_read_outside_of_gathered() -> None:
    model, optimizer = build(3)
    step(model, optimizer)
    weight = model[0].weight
    assert isinstance(weight, Guarded)
    assert (weight.is_leaf, len(weight), "0.weight" in repr(weight)) == (True, 64, True)
    assert torch.zeros_like(weight).sum() == 0
    for use in (
        lambda: weight + 1,
        lambda: weight.data,
        weight.detach,
        lambda: torch.stack([weight, weight]),
        lambda: nn.init.zeros_(weight),
        weight.tolist,
        lambda: f"{weight:}",
        lambda: copy.deepcopy(weight),
        lambda: pickle.dumps(weight),
        model[0].state_dict,
    ):
        with pytest.raises(zerokit.UsageError, match=r"0\.weight.*gathered\(\)"):
            use()
    with optimizer.gathered():
        assert torch.equal(copy.deepcopy(weight), weight)
        assert type(copy.deepcopy(weight)) is nn.Parameter
        assert torch.equal(pickle.loads(pickle.dumps(weight)), weight)
        assert len(model[0].state_dict()) == 2


@on_ranks(2, (0, 2, 3))
def test_a_move_to_where_the_model_is_copies_nothing(stage: int) -> None:
    """For torch "cpu" and "cpu:0" are two devices: trainers name the second."""
    model, optimizer = build(stage)
    step(model, optimizer)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    model.to(torch.device("cpu", 0))
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    with optimizer.gathered():
        model.to("cpu:0")
        assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    step(model, optimizer)


@on_ranks(2, ("gathered, with an exception", "state_dict", "a module called by itself", "double backward"))
def test_units_are_freed_again(moment: str) -> None:
    """`test_schedule` sees more such moments."""
    model, optimizer = build(3)
    step(model, optimizer)
    x = torch.ones(2, 64, requires_grad=True)
    if moment == "gathered, with an exception":
        with pytest.raises(KeyError), optimizer.gathered():
            raise KeyError
    elif moment == "state_dict":
        model.state_dict()
    elif moment == "a module called by itself":
        optimizer.backward(model[0](x).square().mean())
    elif moment == "double backward":
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert optimizer.memory().gathered > 0
        optimizer.backward(gradient.square().mean())
    assert optimizer.memory().gathered == 0


@on_ranks(2, (0, 1, 2, 3))
def test_gradients_are_told_of_shown_and_cleared(stage: int) -> None:
    model, optimizer = build(stage)
    weight: Any = model[0].weight
    assert weight.grad is None
    optimizer.backward(model(torch.ones(2, 64)).square().mean())
    held: Any = weight.grad
    assert type(held) is HeldGradient
    assert held.shape == weight.shape
    for use in (lambda: held + 1, held.norm, lambda: setattr(weight, "grad", torch.zeros(64, 64))):
        with pytest.raises(zerokit.UsageError, match=r"0\.weight\.grad.*gathered_gradients\(\)"):
            use()
    with optimizer.gathered_gradients():
        whole: Any = weight.grad
        assert type(whole) is Tensor
        assert whole.abs().sum() > 0
        whole.mul_(2)
    with optimizer.gathered_gradients():
        again: Any = weight.grad
        assert torch.equal(again, whole)
    del weight.grad
    assert weight.grad is None
    with optimizer.gathered_gradients():
        cleared: Any = weight.grad
        assert cleared.abs().sum() == 0
        assert model[1].weight.grad.abs().sum() > 0
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(zerokit.UsageError, match="before any backward"):
        optimizer.step()
