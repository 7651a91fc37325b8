"""Several torch optimizers as one: steps, closures, schedules and states are those of each by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tests.support.on_ranks import on_ranks
from zerokit.errors import UsageError
from zerokit.integrations.optimizer_list import OptimizerList
from zerokit.integrations.torch_optimizer import Recipe


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


def _optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": rest[:1], "weight_decay": 0.3}, {"params": rest[1:]}]
    return [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(groups, lr=0.2)]


def _train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int, saved: Any = None) -> Any:
    """Train, from what an earlier call returned: states of the model, of the optimizers, and of their schedules."""
    schedules = [LambdaLR(one, lambda step: 0.5**step) for one in optimizers]
    stateful: list[Any] = [model, *optimizers, *schedules]
    for one, state in zip(stateful, copy.deepcopy(saved) or (), strict=False):
        one.load_state_dict(state)
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        for one in stateful[1:]:
            one.step()
    return [one.state_dict() for one in stateful]


def test_it_steps_each_with_one_schedule_and_goes_on_from_its_state() -> None:
    apart, first, second = _model(), _model(), _model()
    _train(apart, _optimizers(apart), 6)
    saved = _train(first, [OptimizerList(_optimizers(first))], 3)
    joined = OptimizerList(_optimizers(second))
    assert [group["lr"] for group in joined.param_groups] == [0.1, 0.2, 0.2]
    _train(second, [joined], 3, saved)
    assert [group["lr"] for group in joined.param_groups] == pytest.approx([0.1 / 64, 0.2 / 64, 0.2 / 64])
    assert all(torch.equal(*pair) for pair in zip(apart.parameters(), second.parameters(), strict=True))


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    model = _model()
    optimizer, calls = OptimizerList(_optimizers(model)), list[Tensor]()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        calls.append(loss)
        return loss

    before = [parameter.clone() for parameter in model.parameters()]
    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_lists_within_are_joined_and_what_is_no_optimizer_is_refused() -> None:
    made = _optimizers(_model())
    assert OptimizerList([OptimizerList(made[:1]), *made[1:]]).parts == made
    with pytest.raises(UsageError, match=r"was given <class 'torch.optim.adamw.AdamW'>: expected optimizers"):
        OptimizerList([made[0], torch.optim.AdamW])  # type: ignore[list-item]


class _Uphill(torch.optim.SGD):
    """Keeps an option on itself, as many public classes do."""

    def __init__(self, params: Any, lr: float = 0.1, *, sign: float = 1.0) -> None:
        super().__init__(params, lr)
        self.sign = sign


def test_options_that_an_optimizer_keeps_on_itself_are_kept() -> None:
    parameters = list(_model().parameters())
    for given in ({}, {"sign": -1.0}, {"lr": 0.3, "sign": 2.0}):
        (part,) = Recipe.of(_Uphill(parameters, **given)).parts
        assert part.options == given


@on_ranks(1)
def test_it_is_taken_apart_by_class_with_options_and_groups() -> None:
    model = _model()
    muon, adamw = Recipe.of(OptimizerList(_optimizers(model))).parts
    assert (muon.optimizer_class, muon.options) == (torch.optim.Muon, {"lr": 0.1})
    assert (adamw.optimizer_class, adamw.options) == (torch.optim.AdamW, {"lr": 0.2})
    assert [group.keys() - {"params"} for group in adamw.groups] == [{"weight_decay"}, set()]
    zero = Recipe([muon, adamw]).build(model, stage=2, precision="fp32")
    assert [group["lr"] for group in zero.param_groups] == [0.1, 0.2, 0.2]
    stepped = OptimizerList(_optimizers(other := _model()))
    _train(other, [stepped], 1)
    with pytest.raises(UsageError, match="this Muon has stepped already"):
        Recipe.of(stepped)
