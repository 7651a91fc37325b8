"""Bad use gets an error that says what was found and what to do, on every rank, within the time-out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.distributed import AT_ONCE, run_alone, run_each, run_ranks, run_ranks_expecting_errors
from zerokit import LossScale

STAGES = (0, 1, 2, 3)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make(model: Any = None, cls: Any = torch.optim.AdamW, **options: Any) -> zerokit.ZeroOptimizer:
    settings: dict[str, Any] = {"precision": "fp32", "lr": 1e-3} | options
    return zerokit.ZeroOptimizer(small() if model is None else model, cls, **settings)


# --- arguments of the constructor --------------------------------------------------------------------------


class WholeNorm(torch.optim.Optimizer):
    """LAMB-like: the step of an element depends on the norm of its whole parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / (p.grad.norm() + 1e-6)))


class RowMean(torch.optim.Optimizer):
    """Looks at the shape: subtracts the mean of each row of the gradient."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * (p.grad - p.grad.mean(-1, keepdim=True)))


class GlobalNorm(torch.optim.SGD):
    """Clips by the norm over all of its parameters before each step."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.5)
        return super().step(closure)


class FallingNorm(torch.optim.SGD):
    """AdaNorm's idea: a gradient whose norm falls below the average of past ones is made as large."""

    average = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                norm = float(p.grad.norm())
                self.average = 0.95 * self.average + 0.05 * norm
                p.grad.mul_(max(self.average / norm, 1.0))
        return super().step(closure)


class Distance(torch.optim.Optimizer):
    """D-Adaptation's idea: the step grows from next to nothing with what all gradients have in common."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.distance, self.along, self.sums = 1e-6, 0.0, {}  # type: ignore[var-annotated]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                total = self.sums.setdefault(p, torch.zeros_like(p))
                self.along += self.distance * group["lr"] * float((p.grad * total).sum())
                total.add_(p.grad, alpha=self.distance)
                p.sub_(p.grad * (group["lr"] * self.distance))
        size = sum(float(total.abs().sum()) for total in self.sums.values())
        self.distance = max(self.distance, 2 * self.along / (group["lr"] * size))


class LateRows(RowMean):
    """Looks at rows from the eleventh step on."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps > 10:
            super().step()


def _lazy() -> None:
    make(nn.Sequential(nn.LazyLinear(4)))


def _scripted() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted: Any = torch.jit.script(nn.Linear(4, 4))
    make(nn.Sequential(nn.Linear(4, 4), scripted))


def _two_groups() -> None:
    model = small()
    make(model, params=[{"params": model.parameters()}, {"params": [model[2].weight]}])


def _foreign() -> None:
    model = small()
    make(model, params=[*model.parameters(), nn.Parameter(torch.zeros(3, 5))])


def _all_frozen() -> None:
    make(small().requires_grad_(False))


def _another_default_device() -> None:
    with torch.device("meta"):
        make()


def _without_parameters() -> None:
    make(nn.ReLU())


#: What is done, the error's class, and words that must be in its message.
CONSTRUCTIONS: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "stage 4": (lambda: make(stage=4), "UsageError", ("stage", "4")),
    "stage -1": (lambda: make(stage=-1), "UsageError", ("stage", "-1")),
    "stage '2'": (lambda: make(stage="2"), "UsageError", ("stage", "'2'")),
    "precision": (lambda: make(precision="fp8"), "UsageError", ("fp8", "bf16")),
    "precision 16": (lambda: make(precision=16), "UsageError", ("16",)),
    "no precision": (lambda: make(precision=None), "UsageError", ("None",)),
    "whole numbers": (lambda: zerokit.Precision(compute=torch.int64), "UsageError", ("int64",)),
    "growth": (lambda: make(precision="fp16", loss_scale=LossScale(growth=0.5)), "UsageError", ("growth",)),
    "floor": (lambda: make(precision="fp16", loss_scale=LossScale(1.0, floor=2.0)), "UsageError", ("floor",)),
    "bucket_mb": (lambda: make(bucket_mb=-1.0), "UsageError", ("bucket_mb", "-1")),
    "two groups": (_two_groups, "UsageError", ("2.weight",)),
    "foreign parameter": (_foreign, "UsageError", ("3, 5",)),
    "all frozen": (_all_frozen, "UsageError", ("requires",)),
    "another default device": (_another_default_device, "UsageError", ("meta", "model.to(device)")),
    "no parameters": (_without_parameters, "UsageError", ("parameter",)),
    "LBFGS": (lambda: make(cls=torch.optim.LBFGS), "UnsupportedOptimizer", ("LBFGS", "AdamW")),
    "Adafactor": (lambda: make(cls=torch.optim.Adafactor), "UnsupportedOptimizer", ("Adafactor", "AdamW")),
    "SparseAdam": (lambda: make(cls=torch.optim.SparseAdam), "UnsupportedOptimizer", ("SparseAdam",)),
    "whole norms": (lambda: make(cls=WholeNorm), "UnsupportedOptimizer", ("WholeNorm",)),
    "row means": (lambda: make(cls=RowMean), "UnsupportedOptimizer", ("RowMean",)),
    "norms over all": (lambda: make(cls=GlobalNorm), "UnsupportedOptimizer", ("GlobalNorm", "norm")),
    "a distance over all": (lambda: make(cls=Distance, lr=1.0), "UnsupportedOptimizer", ("Distance",)),
    "a distance over all, small lr": (
        lambda: make(cls=Distance, lr=1e-3),
        "UnsupportedOptimizer",
        ("Distance",),
    ),
    "norms that fall": (lambda: make(cls=FallingNorm), "UnsupportedOptimizer", ("FallingNorm",)),
    "rows, later": (lambda: make(cls=LateRows), "UnsupportedOptimizer", ("LateRows",)),
    "whole norms, lr 0": (lambda: make(cls=WholeNorm, lr=0.0), "UnsupportedOptimizer", ("WholeNorm",)),
    "units that match nothing": (lambda: make(units=nn.Conv2d), "UsageError", ("Conv2d", "units")),
    "units of no kind": (lambda: make(units="blocks"), "UsageError", ("units",)),
    "an instance": (lambda: make(cls=torch.optim.SGD(small().parameters())), "UsageError", ("class",)),
    "unknown option": (lambda: make(learning_rate=3.0), "TypeError", ("learning_rate",)),
    "complex": (
        lambda: make(nn.Linear(2, 2, dtype=torch.complex64)),
        "UsageError",
        ("complex64", "view_as_real"),
    ),
    "updates at stage 3": (
        lambda: make(stage=3, precision=zerokit.Precision("bf16", wire="int8", wire_updates=True)),
        "UsageError",
        ("choose stage 1 or 2",),
    ),
    "a scripted module": (_scripted, "UsageError", ("1 was made by torch.jit.script", "plain module")),
    "a lazy module": (_lazy, "UsageError", ("0.weight", "one forward")),
}
if hasattr(torch.optim, "Muon"):
    CONSTRUCTIONS["Muon"] = (
        lambda: make(nn.Linear(4, 4, bias=False), torch.optim.Muon),
        "UnsupportedOptimizer",
        ("Muon", "AdamW"),
    )


Said = tuple[list[str], str]
"""The names of an error's classes, the most derived first, and its message; nothing where nothing was raised."""


def _said(attempt: Callable[[], Any]) -> Said:
    try:
        attempt()
    except Exception as error:
        return [cls.__name__ for cls in type(error).__mro__], str(error)
    return [], ""


def _construct_all() -> dict[str, Said]:
    return {name: _said(construct) for name, (construct, _, _) in CONSTRUCTIONS.items()}


@cache
def _constructed() -> list[dict[str, Said]]:
    return run_ranks(2, _construct_all, **AT_ONCE)


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_constructor_refuses(name: str) -> None:
    _, error, words = CONSTRUCTIONS[name]
    for found in _constructed():
        classes, text = found[name]
        assert error in classes, (classes, text)
        assert all(word in text for word in words), text


def _without_a_group() -> None:
    with pytest.raises(zerokit.UsageError, match="init_process_group"):
        make()


def test_no_process_group() -> None:
    run_alone(_without_a_group)


def test_every_error_is_a_zerokit_error() -> None:
    for name in ("UsageError", "LayoutMismatch", "UnsupportedOptimizer", "ScheduleError", "LossScaleError"):
        assert issubclass(getattr(zerokit, name), zerokit.ZerokitError)


# --- use after construction --------------------------------------------------------------------------------


def _train(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    optimizer.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()


def _step_twice(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    _train(model, optimizer)
    optimizer.step()


def _step_after_forward_only(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    model(torch.ones(2, 4))
    optimizer.step()


def _step_without_gradients(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    with torch.no_grad():
        model(torch.ones(2, 4))
    optimizer.step()


def _clip_first(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def _clip_to(norm_type: float, model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    optimizer.backward(model(torch.ones(2, 4)).sum())
    optimizer.clip_grad_norm_(1.0, norm_type)


def _grad_scaler(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    loss = scaler.scale(model(torch.ones(2, 4)).sum())
    torch.autograd.backward(loss)
    scaler.step(optimizer)


def _grad_scaler_unscale(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    torch.autograd.backward(scaler.scale(model(torch.ones(2, 4)).sum()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def _to_double(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    _train(model, optimizer)
    model.to(torch.float64)
    model(torch.ones(2, 4, dtype=torch.float64))


def _half(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    model.half()
    _train(model, optimizer)


def _replace_data(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    model.get_parameter("2.weight").data = torch.zeros(1, 8)
    _train(model, optimizer)


def _replace_parameter(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    model.register_module("2", nn.Linear(8, 1))
    _train(model, optimizer)


def _unfreeze(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    # Frozen when the optimizer was built, so nothing would ever update it.
    model.get_parameter("0.bias").requires_grad_(True)
    _train(model, optimizer)


MISUSES: dict[str, tuple[Callable[[nn.Module, zerokit.ZeroOptimizer], object], tuple[str, ...]]] = {
    "step before any backward": (lambda model, optimizer: optimizer.step(), ("backward",)),
    "a second step without a backward": (_step_twice, ("backward",)),
    "step after a forward alone": (_step_after_forward_only, ("backward",)),
    "step after a forward without gradients": (_step_without_gradients, ("backward",)),
    "clipping before any backward": (_clip_first, ("backward",)),
    "a norm of kind 0": (partial(_clip_to, 0.0), ("0.0",)),
    "a norm of kind -1": (partial(_clip_to, -1.0), ("-1.0",)),
    "a closure without backward": (lambda model, optimizer: optimizer.step(lambda: 0.0), ("backward",)),
    "add_param_group": (lambda model, optimizer: optimizer.add_param_group({"params": []}), ("params=",)),
    "GradScaler.step": (_grad_scaler, ("GradScaler", "fp16")),
    "GradScaler.unscale_": (_grad_scaler_unscale, ("GradScaler", "fp16")),
    "model.to(float64)": (_to_double, ("float64",)),
    "model.half()": (_half, ("float16",)),
    "assigning .data": (_replace_data, ("2.weight",)),
    "unfreezing": (_unfreeze, ("0.bias",)),
    "replacing a module": (_replace_parameter, ("2.weight",)),
}


def _misuse(name: str, stage: int) -> None:
    model = small()
    model.get_parameter("0.bias").requires_grad_(name != "unfreezing")
    optimizer = make(model, stage=stage)
    MISUSES[name][0](model, optimizer)


def _misuse_all(stage: int) -> dict[str, Said]:
    return {name: _said(partial(_misuse, name, stage)) for name in MISUSES}


@cache
def _misused(stage: int) -> list[dict[str, Said]]:
    return run_ranks(2, _misuse_all, stage, **AT_ONCE)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises(name: str, stage: int) -> None:
    for found in _misused(stage):
        classes, text = found[name]
        assert "ZerokitError" in classes, (classes, text)
        assert all(word in text for word in MISUSES[name][1]), text


# --- ranks that differ -------------------------------------------------------------------------------------


def _without_bias(*sizes: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))


def _differ(name: str) -> None:
    """Rank 1 has another model, or another option."""
    odd = dist.get_rank() == 1
    model: nn.Module = small()
    if odd and name in OTHER_MODELS:
        model = OTHER_MODELS[name]()
    if name == "same numel" and not odd:
        model = _without_bias((4, 8), (9, 4))
    if name == "frozen" and odd:
        model.get_parameter("2.bias").requires_grad_(False)
    if name == "groups" and odd:
        make(model, params=[{"params": [p]} for p in model.parameters()])
    usual, other = OTHER_OPTIONS.get(name, ({}, {}))
    make(model, **(other if odd else usual))


OTHER_MODELS: dict[str, Callable[[], nn.Module]] = {
    "shape": lambda: nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1)),
    "same numel": lambda: _without_bias((8, 4), (4, 9)),
    "number of parameters": lambda: nn.Sequential(*small(), nn.Linear(1, 1)),
}
OTHER_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage": ({"stage": 2}, {"stage": 3}),
    "precision": ({"precision": "fp32"}, {"precision": "bf16"}),
    "wire": ({}, {"precision": zerokit.Precision(wire="bf16")}),
    "bucket_mb": ({"bucket_mb": 8.0}, {"bucket_mb": 1e-6}),
    "optimizer": ({}, {"cls": torch.optim.SGD}),
    "lr": ({"lr": 0.1}, {"lr": 0.2}),
    "betas": ({"betas": (0.9, 0.95)}, {"betas": (0.9, 0.96)}),
    "units": ({"bucket_mb": 1e-6, "units": nn.Tanh}, {"bucket_mb": 1e-6, "units": (nn.Tanh, nn.Linear)}),
}
#: What differs on rank 1, and a word by which the error names it.
DIFFERENCES = {
    "shape": "0.weight",
    "same numel": "weight",
    "number of parameters": "parameters",
    "stage": "stage",
    "precision": "precision",
    "wire": "wire",
    "bucket_mb": "bucket_mb",
    "frozen": "2.bias",
    "optimizer": "SGD",
    "lr": "lr",
    "betas": "betas",
    "units": "units",
    "groups": "group",
}


def _differ_in_all() -> dict[str, Said]:
    return {name: _said(partial(_differ, name)) for name in DIFFERENCES}


@cache
def _differed() -> list[dict[str, Said]]:
    return run_ranks(3, _differ_in_all, **AT_ONCE)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_are_named_on_every_rank(name: str) -> None:
    for found in _differed():
        classes, text = found[name]
        assert "LayoutMismatch" in classes, (classes, text)
        assert "rank 1" in text
        assert DIFFERENCES[name] in text


def _one_rank_is_refused() -> None:
    make(stage=4 if dist.get_rank() == 1 else 2)


def test_a_constructor_that_fails_on_one_rank_ends_the_others_within_the_time_out() -> None:
    first, second, third = run_ranks_expecting_errors(3, _one_rank_is_refused, timeout=3.0)
    assert second.raised("UsageError")
    for outcome in (first, third):
        assert outcome.raised("ZerokitError"), outcome.describe()


def _built_anew(stage: int) -> None:
    model = small()
    optimizer = make(model, stage=stage)
    del optimizer
    with pytest.raises(zerokit.UsageError, match=r"build the model anew .* state_dict\(\)"):
        make(model, stage=stage)
    weights = model.state_dict()
    again = small()
    again.load_state_dict(weights)
    make(again, stage=stage)
    assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())


def test_a_model_whose_optimizer_was_deleted_must_be_built_anew() -> None:
    run_each(2, _built_anew, STAGES)
