"""Bad use gets an error that says what was found and what to do, on every rank, within the time-out."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.support.distributed import AT_ONCE, run_alone, run_ranks, run_ranks_expecting_errors
from tests.support.on_ranks import on_ranks
from zerokit import LossScale

STAGES = (0, 1, 2, 3)


def small() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make(model: Any = None, cls: Any = torch.optim.AdamW, **options: Any) -> zerokit.ZeroOptimizer:
    settings: dict[str, Any] = {"precision": "fp32", "lr": 1e-3} | options
    return zerokit.ZeroOptimizer(small() if model is None else model, cls, **settings)


# --- arguments of the constructor --------------------------------------------------------------------------


class Odd(torch.optim.SGD):
    """Changes all gradients of its parameters together, by `change`, before each step; `memory` is for it alone."""

    def __init__(self, params: Any, lr: float, change: Callable[[Odd, list[nn.Parameter]], Any]) -> None:
        super().__init__(params, lr=lr)
        self.change, self.memory = change, {"steps": 0.0, "average": 0.0, "distance": 1e-6, "along": 0.0}
        self.sums: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.memory["steps"] += 1
        params = [p for group in self.param_groups for p in group["params"]]
        self.change(self, [p for p in params if p.grad is not None])
        return super().step(closure)


def _gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


def _row_means(odd: Odd, params: list[nn.Parameter], after: int = 0) -> None:
    """Looks at the shape: subtracts the mean of each row of the gradient."""
    for p in params if odd.memory["steps"] > after else ():
        _gradient(p).sub_(_gradient(p).mean(-1, keepdim=True))


def _falling_norms(odd: Odd, params: list[nn.Parameter]) -> None:
    """AdaNorm's idea: a gradient whose norm falls below the average of past ones is made as large."""
    for p in params:
        norm = float(_gradient(p).norm())
        odd.memory["average"] = 0.95 * odd.memory["average"] + 0.05 * norm
        _gradient(p).mul_(max(odd.memory["average"] / norm, 1.0))


def _distances(odd: Odd, params: list[nn.Parameter]) -> None:
    """D-Adaptation's idea: the step grows from next to nothing with what all gradients have in common."""
    memory, lr = odd.memory, odd.param_groups[0]["lr"]
    for p in params:
        total = odd.sums.setdefault(p, torch.zeros_like(p))
        memory["along"] += memory["distance"] * lr * float((_gradient(p) * total).sum())
        total.add_(_gradient(p), alpha=memory["distance"])
        _gradient(p).mul_(memory["distance"])
    size = sum(float(total.abs().sum()) for total in odd.sums.values())
    memory["distance"] = max(memory["distance"], 2 * memory["along"] / (lr * size))


def _with_a_sparse_buffer() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    return model


def _expanded() -> nn.Module:
    model = nn.Linear(2, 2)
    model.bias = nn.Parameter(torch.zeros(1).expand(2))
    return model


def _from_inference() -> nn.Module:
    with torch.inference_mode():
        return small()  # type: ignore[no-any-return]


def _with_buffer(values: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("scale", values)
    return model


def _inside_inference() -> None:
    with torch.inference_mode():
        make()


def _scripted() -> nn.Module:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return nn.Sequential(torch.jit.script(nn.Linear(2, 2)))


def _in_two_groups() -> None:
    model = small()
    make(model, params=[{"params": model.parameters()}, {"params": [model[2].weight]}])


def _with_a_foreign_parameter() -> None:
    model = small()
    make(model, params=[*model.parameters(), nn.Parameter(torch.zeros(3, 5))])


def _with_another_default_device() -> None:
    with torch.device("meta"):
        make()


OPTIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"stage": 4}, ("stage", "4")),
    ({"stage": -1}, ("stage", "-1")),
    ({"stage": "2"}, ("stage", "'2'")),
    ({"precision": "fp8"}, ("fp8", "bf16")),
    ({"precision": 16}, ("16",)),
    ({"precision": None}, ("None",)),
    ({"bucket_mb": -1.0}, ("bucket_mb", "-1")),
    ({"bucket_mb": float("inf")}, ("bucket_mb", "inf")),
    ({"units": nn.Conv2d}, ("Conv2d", "units")),
    ({"units": "blocks"}, ("units",)),
    ({"cls": torch.optim.SGD(small().parameters())}, ("class",)),
    ({"model": small().requires_grad_(False)}, ("requires",)),
    ({"model": nn.ReLU()}, ("parameter",)),
    ({"model": nn.Linear(2, 2, dtype=torch.complex64)}, ("complex64", "view_as_real")),
    ({"model": _with_a_sparse_buffer()}, ("buffer adjacency", "sparse_coo", "plain attribute")),
    ({"model": _expanded()}, ("bias is expanded", "share memory", ".clone()")),
    ({"model": _from_inference()}, ("0.weight was made inside torch.inference_mode()", "torch.no_grad()")),
    ({"model": _scripted()}, ("0 is a RecursiveScriptModule of torch.jit", "plain module")),
]
"""Options of the constructor that are refused, and words of the error."""
CLASSES: list[tuple[Any, dict[str, Any], str]] = [
    (torch.optim.LBFGS, {}, "AdamW"),
    (torch.optim.SparseAdam, {}, ""),
    (Odd, {"change": _falling_norms}, "norm"),
    (Odd, {"change": lambda _, params: nn.utils.clip_grad_norm_(params, 0.5)}, "norm"),
    (Odd, {"change": partial(_row_means, after=10)}, "what it counts"),
    (Odd, {"change": _distances, "lr": 1.0}, "norm"),
    (Odd, {"change": _distances, "lr": 1e-3}, "norm"),
]
"""Optimizers that look beyond a tensor, or count on themselves, their options, and a word of the error."""

Row = tuple[Callable[[], Any], str, tuple[str, ...]]
"""What is done, the error's class, and words of its message."""


def _constructions() -> dict[str, Row]:
    rows: dict[str, Row] = {
        "two groups": (_in_two_groups, "UsageError", ("2.weight",)),
        "foreign parameter": (_with_a_foreign_parameter, "UsageError", ("3, 5",)),
        "inference mode": (_inside_inference, "UsageError", ("inside torch.inference_mode()", "outside")),
        "lazy": (
            lambda: make(nn.LazyLinear(2)),
            "UsageError",
            ("weight is in a lazy module", "once on a batch"),
        ),
        "another default device": (_with_another_default_device, "UsageError", ("meta", "model.to(device)")),
        "int64": (lambda: zerokit.Precision(compute=torch.int64), "UsageError", ("int64",)),
        "growth": (lambda: LossScale(growth=0.5), "UsageError", ("growth",)),
        "floor": (lambda: LossScale(1.0, floor=2.0), "UsageError", ("floor",)),
        "unknown option": (lambda: make(learning_rate=3.0), "TypeError", ("learning_rate",)),
    }
    for options, words in OPTIONS:
        rows[str(options)] = partial(make, **options), "UsageError", words
    for number, (cls, given, word) in enumerate(CLASSES):
        attempt = partial(make, cls=cls, **given)
        rows[f"{number}, {given}"] = attempt, "UnsupportedOptimizer", (cls.__name__, word)
    return rows


# --- use after construction --------------------------------------------------------------------------------

Misuse = Callable[[Any, Any], object]


def _backward(model: nn.Module, optimizer: Any) -> None:
    optimizer.backward(model(torch.ones(2, 4)).sum())


def _train(model: nn.Module, optimizer: Any) -> None:
    _backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def _then(first: Misuse, second: Misuse) -> Misuse:
    return lambda model, optimizer: (first(model, optimizer), second(model, optimizer))


def _step(model: nn.Module, optimizer: Any) -> None:
    optimizer.step()


def _clip(model: nn.Module, optimizer: Any, norm_type: float = 2.0) -> None:
    optimizer.clip_grad_norm_(1.0, norm_type)


def _forward_without_gradients(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        model(torch.ones(2, 4))


def _scale(model: nn.Module, optimizer: Any, unscale: bool) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)


def _to_double(model: nn.Module, optimizer: Any) -> None:
    _train(model, optimizer)
    model.to(torch.float64)
    model(torch.ones(2, 4, dtype=torch.float64))


def _replace_data(model: nn.Module, optimizer: Any) -> None:
    model.get_parameter("2.weight").data = torch.zeros(1, 8)


MISUSES: dict[str, tuple[Misuse, tuple[str, ...]]] = {
    "step before any backward": (_step, ("backward",)),
    "a second step without a backward": (_then(_train, _step), ("backward",)),
    "step after a forward alone": (_then(lambda model, _: model(torch.ones(2, 4)), _step), ("backward",)),
    "step after a forward without gradients": (_then(_forward_without_gradients, _step), ("backward",)),
    "clipping before any backward": (_then(_clip, _step), ("backward",)),
    "a norm of kind 0": (_then(_backward, partial(_clip, norm_type=0.0)), ("0.0",)),
    "a norm of kind -1": (_then(_backward, partial(_clip, norm_type=-1.0)), ("-1.0",)),
    "a closure without backward": (lambda _, optimizer: optimizer.step(lambda: 0.0), ("backward",)),
    "add_param_group": (lambda _, optimizer: optimizer.add_param_group({"params": []}), ("params=",)),
    "GradScaler.step": (partial(_scale, unscale=False), ("GradScaler", "fp16")),
    "GradScaler.unscale_": (partial(_scale, unscale=True), ("GradScaler", "fp16")),
    "model.to(float64)": (_to_double, ("float64",)),
    "model.half()": (_then(lambda model, _: model.half(), _train), ("float16",)),
    "assigning .data": (_then(_replace_data, _train), ("2.weight",)),
    "replacing a module": (
        _then(lambda model, _: model.register_module("2", nn.Linear(8, 1)), _train),
        ("2.weight",),
    ),
    # Frozen when the optimizer was built, so nothing would ever update it.
    "unfreezing": (
        _then(lambda model, _: model.get_parameter("0.bias").requires_grad_(True), _train),
        ("0.bias",),
    ),
}


def _misuse(name: str, stage: int) -> None:
    model = small()
    model.get_parameter("0.bias").requires_grad_(name != "unfreezing")
    optimizer = make(model, stage=stage)
    MISUSES[name][0](model, optimizer)


# --- ranks that differ -------------------------------------------------------------------------------------


def _without_bias(*sizes: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))


def _partly_frozen() -> nn.Module:
    model = small()
    model[2].bias.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def _own_groups(model: nn.Module, **options: Any) -> dict[str, Any]:
    return {"model": model, "params": [{"params": [p], **options} for p in model.parameters()]}


UNITS = {"bucket_mb": 1e-6, "units": nn.Tanh}
DIFFERENCES: list[tuple[str, Callable[[], dict[str, Any]], Callable[[], dict[str, Any]]]] = [
    ("0.weight", dict, lambda: {"model": nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))}),
    (
        "weight",  # as many elements
        lambda: {"model": _without_bias((4, 8), (9, 4))},
        lambda: {"model": _without_bias((8, 4), (4, 9))},
    ),
    ("parameters", dict, lambda: {"model": nn.Sequential(*small(), nn.Linear(1, 1))}),
    ("2.bias", dict, lambda: {"model": _partly_frozen()}),
    ("group", dict, lambda: _own_groups(small())),
    ("weight_decay of group 1", lambda: _own_groups(small()), lambda: _own_groups(small(), weight_decay=0.1)),
    ("stage", lambda: {"stage": 2}, lambda: {"stage": 3}),
    ("precision", dict, lambda: {"precision": "bf16"}),
    ("wire", dict, lambda: {"precision": zerokit.Precision(wire="bf16")}),
    ("bucket_mb", lambda: {"bucket_mb": 8.0}, lambda: {"bucket_mb": 1e-6}),
    ("SGD", dict, lambda: {"cls": torch.optim.SGD}),
    ("lr", lambda: {"lr": 0.1}, lambda: {"lr": 0.2}),
    ("betas", lambda: {"betas": (0.9, 0.95)}, lambda: {"betas": (0.9, 0.96)}),
    ("units", lambda: UNITS, lambda: UNITS | {"units": (nn.Tanh, nn.Linear)}),
]
"""A word by which the error names what differs, the arguments of other ranks, and those of rank 1."""


def _differ(usual: Callable[[], dict[str, Any]], other: Callable[[], dict[str, Any]]) -> None:
    make(**(other if dist.get_rank() == 1 else usual)())


# --- all of it ---------------------------------------------------------------------------------------------


def _rows() -> dict[str, Row]:
    rows = _constructions()
    for name, stage in itertools.product(MISUSES, (0, 2, 3)):
        rows[f"{name}, stage {stage}"] = partial(_misuse, name, stage), "ZerokitError", MISUSES[name][1]
    for word, *both in DIFFERENCES:
        rows[f"ranks differ in {word}"] = partial(_differ, *both), "LayoutMismatch", ("rank 1", word)
    return rows


def _complaints() -> list[str]:
    found = []
    for name, (attempt, error, words) in _rows().items():
        try:
            attempt()
            found.append(f"{name}: nothing was raised")
        except Exception as raised:
            classes = [cls.__name__ for cls in type(raised).__mro__]
            if error not in classes or not all(word in str(raised) for word in words):
                found.append(f"{name}: {classes[0]}: {raised}")
    return found


def test_bad_use_is_refused_by_every_rank_in_words() -> None:
    assert run_ranks(3, _complaints, **AT_ONCE) == [[]] * 3


def _without_a_group() -> None:
    for name in ("UsageError", "LayoutMismatch", "UnsupportedOptimizer", "ScheduleError", "LossScaleError"):
        assert issubclass(getattr(zerokit, name), zerokit.ZerokitError)
    with pytest.raises(zerokit.UsageError, match="init_process_group"):
        make()


def test_without_a_process_group_errors_are_zerokits_too() -> None:
    run_alone(_without_a_group)


def _one_rank_is_refused() -> None:
    make(stage=4 if dist.get_rank() == 1 else 2)


def test_a_constructor_that_fails_on_one_rank_ends_the_others_within_the_time_out() -> None:
    first, second, third = run_ranks_expecting_errors(3, _one_rank_is_refused, timeout=20.0)
    assert second.raised("UsageError")
    for outcome in (first, third):
        assert outcome.raised("ZerokitError"), outcome.describe()


@on_ranks(2, STAGES)
def test_a_model_whose_optimizer_was_deleted_must_be_released_or_built_anew(stage: int) -> None:
    model = small()
    optimizer = make(model, stage=stage)
    del optimizer
    with pytest.raises(zerokit.UsageError, match=r"call zerokit\.release\(model\)"):
        make(model, stage=stage)
    weights = model.state_dict()
    again = small()
    again.load_state_dict(weights)
    zerokit.release(model)
    for one in (again, model):
        make(one, stage=stage)
        assert all(torch.equal(value, weights[name]) for name, value in one.state_dict().items())


@on_ranks(2, (0, 2, 3))
def test_a_rank_that_loads_a_state_alone_is_named(stage: Any) -> None:
    """Before the first pass at once, by what each rank does, and no rank then trains on with other weights."""
    model = nn.Linear(4, 2)
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=stage, precision="fp32", lr=0.1)
    values = {"weight": torch.ones(2, 4), "bias": torch.ones(2)}
    call = partial(model, torch.ones(1, 4)) if dist.get_rank() else partial(model.load_state_dict, values)
    with pytest.raises(
        zerokit.ScheduleError, match=r"0: end of .*load_state_dict\(\), rank 1: end of forward"
    ):
        call()
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(1, 4)).sum())
    with pytest.raises(zerokit.LayoutMismatch):
        optimizer.step()
