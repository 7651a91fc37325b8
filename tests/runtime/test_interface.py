"""What is called on a torch optimizer beside its step: the same as in PyTorch, or refused with advice."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

import zerokit
from tests.support.on_ranks import on_ranks
from zerokit.runtime.precision import DtypeName


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv:2405.15682): training weights are y, evaluation's x, and z is SGD's own."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": False})

    @torch.no_grad()
    def _swap(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] is not training:
                weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["training"] = training

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            mix = 1 / group["k"]
            for p in group["params"]:
                assert p.grad is not None
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, mix)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - mix) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    value: Tensor = model(x).square().mean()
    return value


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _schedule_free(
    model: nn.Module, optimizer: Any, backward: Callable[[int], None]
) -> list[dict[str, Tensor]]:
    """The weights that evaluations see, and those that training goes on with."""
    seen = []
    for step in range(4):
        optimizer.train()
        backward(step)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.train()
        optimizer.eval()
        seen.append(_values(model))
        optimizer.eval()
    optimizer.train()
    return [*seen, _values(model)]


@on_ranks(2, (0, 1, 2, 3))
def test_optimizers_with_modes_evaluate_their_own_weights(stage: Any) -> None:
    plain = _model()
    reference = ScheduleFree(plain.parameters(), lr=0.3)

    def both(step: int) -> None:
        for rank in range(2):
            (_loss(plain, rank, step) / 2).backward()

    expected = _schedule_free(plain, reference, both)
    model = _model()
    optimizer = zerokit.ZeroOptimizer(
        model, ScheduleFree, stage=stage, precision="fp32", bucket_mb=1e-4, lr=0.3
    )
    found = _schedule_free(
        model, optimizer, lambda step: optimizer.backward(_loss(model, dist.get_rank(), step))
    )
    for seen, right in zip(found, expected, strict=True):
        for name, value in right.items():
            torch.testing.assert_close(seen[name], value, rtol=1e-5, atol=1e-6)
    assert not hasattr(zerokit.ZeroOptimizer(nn.Linear(2, 2), torch.optim.SGD, lr=0.1), "train")


@on_ranks(2, (0, 2, 3))
def test_a_step_that_the_optimizer_refuses_changes_nothing(stage: Any) -> None:
    """Its own error passes, and the same step succeeds in the mode of training, with a count too."""
    found = []
    for refused in (True, False):
        model = _model()
        optimizer = zerokit.ZeroOptimizer(model, ScheduleFree, stage=stage, precision="fp32", lr=0.3)
        for step in range(3):
            optimizer.train()
            optimizer.backward(_loss(model, dist.get_rank(), step), count=3)
            optimizer.eval()
            if refused:
                with pytest.raises(RuntimeError, match="not in train mode"):
                    optimizer.step()
            optimizer.train()
            optimizer.step()
            optimizer.zero_grad()
        found.append(_values(model))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


class Failing(torch.optim.SGD):
    """An optimizer whose step raises an error: before its update, or halfway through it."""

    fails: Literal["", "at once", "halfway"] = ""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.fails == "halfway":
            self.param_groups[0]["params"][0].detach().add_(1.0)
        if self.fails:
            raise RuntimeError("no memory left")
        super().step()


@on_ranks(2, (3,))
def test_what_one_rank_has_not_updated_is_found(stage: Any) -> None:
    """If anything has changed, that rank refuses its next step at once; otherwise all ranks find out in it."""
    fails: Literal["at once", "halfway"]
    for fails in ("halfway", "at once"):
        model = _model()
        optimizer = zerokit.ZeroOptimizer(model, Failing, stage=stage, precision="fp32", lr=0.3)
        rank = dist.get_rank()
        optimizer.backward(_loss(model, rank, 0))
        if rank:
            optimizer._inner.fails = fails  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="no memory") if rank else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        if fails == "halfway":
            with pytest.raises(zerokit.UsageError, match="halfway") if rank else nullcontext():
                optimizer.require_steppable()
            continue
        optimizer.backward(_loss(model, rank, 1))
        with pytest.raises(zerokit.LayoutMismatch, match="different sequences"):
            optimizer.step()


@on_ranks(2, (2, 3))
def test_a_state_of_another_mode_is_taken_as_it_is(stage: Any) -> None:
    """What was saved while the weights were those of evaluations goes on from there."""
    model = _model()
    optimizer = zerokit.ZeroOptimizer(model, ScheduleFree, stage=stage, precision="fp32", lr=0.3)
    _schedule_free(model, optimizer, lambda step: optimizer.backward(_loss(model, dist.get_rank(), step)))
    training = _values(model)
    optimizer.eval()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.train()
    optimizer.load_state_dict(saved)
    optimizer.train()
    for name, value in _values(model).items():
        torch.testing.assert_close(value, training[name])


@on_ranks(2, ("fp32", "fp16"))
def test_a_norm_that_is_not_finite_is_an_error_where_one_is_asked_for(precision: DtypeName) -> None:
    model = _model()
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.SGD, precision=precision, loss_scale=zerokit.LossScale(8.0), lr=0.1
    )
    before = _values(model)
    optimizer.backward(_loss(model, 0, 0) * (math.inf if dist.get_rank() else 1.0))
    with pytest.raises(zerokit.NonFiniteError, match=r"norm of type 2 is nan|norm of type 2 is inf"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    optimizer.zero_grad()
    optimizer.backward(_loss(model, 0, 0))
    assert optimizer.clip_grad_norm_(1.0, 2.0, error_if_nonfinite=True, foreach=False) > 0
    optimizer.step()
    assert all(value.isfinite().all() for value in _values(model).values())
    assert any(not value.equal(before[name]) for name, value in _values(model).items())


@on_ranks(2)
def test_hooks_of_states_run() -> None:
    optimizer = zerokit.ZeroOptimizer(_model(), torch.optim.SGD, lr=0.1)
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 5})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(str(state.pop("mine"))))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after"))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert calls == ["before", "5", "after"]


@on_ranks(2)
def test_what_has_no_meaning_is_refused_with_advice() -> None:
    model: Any = _model()
    optimizer: Any = zerokit.ZeroOptimizer(model, torch.optim.SGD, precision="fp16", lr=0.1)
    group = optimizer.param_groups[0]["params"]
    cases: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: optimizer.step(scale=2.0),
            r"step\(scale=\.\.\.\): .* set options in optimizer\.param_groups",
        ),
        (lambda: Join([optimizer]), r"run out of batches .* \(DistributedSampler does\)"),
        (lambda: model[0].weight in group, r"0\.weight is compared with .* optimizer\.layout\.parameters"),
        (lambda: model[0].weight == group[0], r"0\.weight is compared with"),
        (
            lambda: zerokit.ZeroOptimizer(_model(), torch.optim.SGD, lr=0.1, loss_scale=1024.0),  # type: ignore[arg-type]
            r"loss_scale=1024\.0: .* LossScale\(value=1024\.0, interval=10\*\*9\)",
        ),
        (lambda: zerokit.LossScale(growth=1.0), r"growth must exceed 1.* a scale that stays is LossScale"),
        (lambda: optimizer.eval, "SGD has no eval"),
    ]
    for call, words in cases:
        with pytest.raises((zerokit.UsageError, AttributeError), match=words):
            call()


@on_ranks(2, (0, 2, 3))
def test_torchs_functions_for_states_of_models_work(stage: Any) -> None:
    model = _model()
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=stage, precision="fp32", lr=0.1)
    optimizer.backward(_loss(model, 0, 0))
    optimizer.step()
    state: dict[str, Any] = get_model_state_dict(model)
    assert all(state[name].equal(value) for name, value in _values(model).items())
    set_model_state_dict(model, {name: torch.full_like(value, 0.5) for name, value in state.items()})
    assert all(value.eq(0.5).all() for value in _values(model).values())
    with pytest.raises(zerokit.UsageError, match=r"zerokit\.save\(\)"):
        get_optimizer_state_dict(model, optimizer)
    own = optimizer.state_dict()
    for copied in (copy.deepcopy(own), _through_a_file(own)):
        assert copied.keys() == own.keys()
        optimizer.load_state_dict(copied)


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read: dict[str, Any] = torch.load(file, weights_only=True)
    return read
