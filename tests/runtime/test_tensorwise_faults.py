"""The five faults of another library's Muon, each as a test; what is refused, on every rank, and what is warned of."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Muon

import zerokit
from tests.support.distributed import run_ranks_expecting_errors
from tests.support.on_ranks import on_ranks
from tests.support.training import digest, whole_weights
from zerokit.errors import ZerokitWarning

STAGES = (0, 1, 2, 3)
RATE = 0.1


def _net() -> nn.Sequential:
    """Matrices larger than a rank's share, so that each is cut where stages cut."""
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 1))


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [model.get_parameter(f"{layer}.weight") for layer in (0, 2)]


def _rest(model: nn.Module) -> list[nn.Parameter]:
    matrices = _matrices(model)
    return [p for p in model.parameters() if all(p is not other for other in matrices)]


def _make(model: nn.Module, classes: Any, **options: Any) -> zerokit.ZeroOptimizer:
    return zerokit.ZeroOptimizer(model, classes, precision="fp32", **options)


def _build(stage: Any, cls: Any = Muon, *, meta: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    with torch.device("meta" if meta else "cpu"):
        model = _net()
    muon = {"params": _matrices(model), "lr": RATE, "weight_decay": 0.0}
    classes = {cls: [muon], AdamW: [{"params": _rest(model), "lr": 1e-3}]}
    return model, _make(model, classes, stage=stage, bucket_mb=1e-6, **options)


def _loss(model: nn.Module, number: int, rank: int) -> Tensor:
    batch = torch.randn(30, 24, generator=torch.Generator().manual_seed(10 * number + rank))
    loss: Tensor = model(batch).square().mean()
    return loss


def _train(model: nn.Module, optimizer: Any, *numbers: int, micro: int = 1) -> None:
    for number in numbers:
        for part in range(micro):
            optimizer.backward(_loss(model, micro * number + part, dist.get_rank()) / micro)
        optimizer.step()
        optimizer.zero_grad()


def _expected(start: dict[str, Tensor], *numbers: int) -> dict[str, Tensor]:
    """The weights after plain torch's Muon and AdamW, whose gradients are sums of ranks' gradients in their order."""
    model, world = _net(), dist.get_world_size()
    model.load_state_dict(start)
    optimizers = [
        Muon(_matrices(model), lr=RATE, weight_decay=0.0),
        AdamW(_rest(model), lr=1e-3, fused=True),
    ]
    for number in numbers:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for rank in range(world):
            gradients = torch.autograd.grad(_loss(model, number, rank), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient * (1.0 / world)
        for optimizer in optimizers:
            optimizer.step()
    return dict(model.state_dict())


def _require_equal(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = whole_weights(model)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6, msg=name)


@on_ranks(3, STAGES)
def test_fault_1_muon_stepped_on_its_own_shard(stage: int) -> None:
    model, optimizer = _build(stage)
    start = {name: value.clone() for name, value in whole_weights(model).items()}
    _train(model, optimizer, 0, 1)
    _require_equal(model, _expected(start, 0, 1))


@on_ranks(2, STAGES)
def test_fault_2_muon_off_under_deferred_initialisation(stage: int) -> None:
    model, optimizer = _build(stage, meta=True)
    start = {name: value.clone() for name, value in whole_weights(model).items()}
    _train(model, optimizer, 0, 1)
    _require_equal(model, _expected(start, 0, 1))
    kinds = {kind for state in optimizer.state.values() for kind in state}
    assert kinds <= {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, kinds)
    assert "momentum_buffer" in everyone[0] | everyone[1]


@on_ranks(2, [0, (0, 0), (0, 3)])
def test_fault_3_plain_sgd_at_stage_0(stage: Any) -> None:
    """Every rank has all of the optimizer, or all of it among the ranks of an inner axis."""
    mesh = (1, 2) if isinstance(stage, tuple) else None
    model, optimizer = _build(stage, mesh=mesh)
    start = {name: value.clone() for name, value in whole_weights(model).items()}
    _train(model, optimizer, 0, 1)
    _require_equal(model, _expected(start, 0, 1))


class Counting(torch.optim.Optimizer):
    """Looks at whole tensors, and counts the updates of each."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["updates"] = self.state[p].get("updates", 0) + 1
                    p.sub_(p.grad / (p.grad.norm() + 1e-6), alpha=group["lr"])


@on_ranks(2, itertools.product(STAGES, (False, True)))
def test_fault_4_muon_stepped_once_a_micro_batch(given: tuple[int, bool]) -> None:
    stage, adds = given
    model, optimizer = _build(stage, Counting)
    for number in range(4):
        if adds:
            with optimizer.accumulate():
                optimizer.backward(_loss(model, 99, dist.get_rank()))
        _train(model, optimizer, number, micro=3)
    updates = [state["updates"] for state in optimizer.state.values() if "updates" in state]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, updates)
    assert everyone == ([[4, 4]] * 2 if stage == 0 else everyone)
    assert {count for counts in everyone for count in counts} == {4}
    assert sum(map(len, everyone)) == (4 if stage == 0 else 2)


@on_ranks(4, STAGES)
def test_fault_5_ranks_diverge(stage: int) -> None:
    model, optimizer = _build(stage)
    for number in range(4):
        _train(model, optimizer, *range(5 * number, 5 * number + 5))
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, digest(whole_weights(model).items()))
        assert len(set(everyone)) == 1


# ---- what is refused

Classes = Callable[[nn.Module], Any]


def _lbfgs(model: nn.Module) -> Any:
    return {torch.optim.LBFGS: list(model.parameters())}


def _lamb_with_a_global_norm(model: nn.Module) -> Any:
    from pytorch_optimizer import Lamb

    return {functools.partial(Lamb, pre_norm=True): list(model.parameters())}


def _with_objects_as_states(model: nn.Module) -> Any:
    from pytorch_optimizer import ScalableShampoo

    return {ScalableShampoo: list(model.parameters())}


class Talkative(Counting):
    """Exchanges with other ranks in its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                dist.broadcast(p.detach(), 0)


def _two(first: Callable[[nn.Module], Any], second: Callable[[nn.Module], Any]) -> Classes:
    return lambda model: {Muon: first(model), AdamW: second(model)}


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if name not in ("0.weight", "2.weight")]


_ADAMW: Any = AdamW
REFUSED: dict[str, tuple[Classes, str, tuple[str, ...], dict[str, Any]]] = {
    "LBFGS": (_lbfgs, "UnsupportedOptimizer", ("LBFGS",), {}),
    "a LAMB with a global norm": (_lamb_with_a_global_norm, "UnsupportedOptimizer", ("Lamb", "norm"), {}),
    "objects as states": (
        _with_objects_as_states,
        "UnsupportedOptimizer",
        ("ScalableShampoo", "PreConditioner"),
        {},
    ),
    "a class that communicates": (
        lambda model: {Talkative: _matrices(model), AdamW: _rest(model)},
        "UnsupportedOptimizer",
        ("Talkative",),
        {},
    ),
    "Muon given a bias": (
        _two(
            lambda model: [*_matrices(model), model.get_parameter("0.bias")], lambda model: _rest(model)[1:]
        ),
        "ZerokitError",
        ("Muon", "0.bias"),
        {},
    ),
    "a parameter twice": (
        _two(_matrices, lambda model: list(model.parameters())),
        "UsageError",
        ("0.weight", "group 0", "group 1"),
        {},
    ),
    "a parameter twice in one class": (
        _two(lambda model: [*_matrices(model), *_matrices(model)], _rest),
        "ZerokitError",
        ("0.weight",),
        {},
    ),
    "a parameter left out": (
        _two(_matrices, lambda model: _rest(model)[1:]),
        "UsageError",
        ("0.bias", "in no group"),
        {},
    ),
    "options beside a dict": (_two(_matrices, _rest), "UsageError", ("lr",), {"lr": 0.1}),
    "params= beside a dict": (_two(_matrices, _rest), "UsageError", ("params",), {"params": []}),
    "an unknown name": (_two(lambda _: ["0.weight", "2.wieght"], _names), "UsageError", ("2.wieght",), {}),
    "no class": (lambda _: {}, "UsageError", ("class",), {}),
    "a foreign parameter": (
        _two(lambda model: [*_matrices(model), nn.Parameter(torch.ones(5, 7))], _rest),
        "UsageError",
        ("5, 7",),
        {},
    ),
    "an option that the class has not": (
        lambda model: {functools.partial(_ADAMW, beta=3): _rest(model), Muon: _matrices(model)},
        "TypeError",
        ("beta",),
        {},
    ),
    "row blocks of no parameter": (
        _two(_matrices, _rest),
        "UsageError",
        ("row_blocks", "7.weight"),
        {"row_blocks": {"7.weight": 2}},
    ),
    "rows that do not divide": (
        _two(_matrices, _rest),
        "UsageError",
        ("row_blocks", "0.weight", "40", "3"),
        {"row_blocks": {"0.weight": 3}},
    ),
    "rows that are not all": (
        _two(_matrices, _rest),
        "UsageError",
        ("row_blocks", "0.weight", "40"),
        {"row_blocks": {"0.weight": (10, 20)}},
    ),
    "row blocks for an elementwise class": (
        _two(_matrices, _rest),
        "UsageError",
        ("row_blocks", "4.weight"),
        {"row_blocks": {"4.weight": 1}},
    ),
}


def _refused(label: str, stage: int) -> None:
    classes, _, _, options = REFUSED[label]
    model = _net()
    _make(model, classes(model), stage=stage, **options)


@pytest.mark.parametrize("label", REFUSED)
def test_refused_on_every_rank(label: str) -> None:
    _, kind, words, _ = REFUSED[label]
    for stage in (0, 3):
        for outcome in run_ranks_expecting_errors(2, _refused, label, stage):
            assert outcome.raised(kind), outcome.describe()
            for word in words:
                assert word in outcome.error, outcome.describe()


def _differ() -> None:
    model = _net()
    matrices = _matrices(model)[: 2 - dist.get_rank()]
    rest = [p for p in model.parameters() if all(p is not other for other in matrices)]
    _make(model, {Muon: matrices, AdamW: rest})


def test_ranks_that_deal_differently_are_told_so() -> None:
    for outcome in run_ranks_expecting_errors(2, _differ):
        assert outcome.raised("LayoutMismatch"), outcome.describe()
        assert "2.weight" in outcome.error


# ---- what is warned of


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.score = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.body(self.tokens(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("body.weight",), ()),
        (("body.weight", "tokens.weight"), ("tokens.weight", "embedding")),
        (("body.weight", "score.weight"), ("score.weight", "row")),
    ],
)
@on_ranks(2)
def test_a_matrix_optimizer_of_an_embedding_or_a_row_is_warned_of(
    given: tuple[str, ...], named: tuple[str, ...]
) -> None:
    model = Words()
    rest = [name for name, _ in model.named_parameters() if name not in given]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _make(model, {Muon: list(given), AdamW: rest})
    said = [str(one.message) for one in caught if issubclass(one.category, ZerokitWarning)]
    assert len(said) == (1 if named and dist.get_rank() == 0 else len(said) if named else 0)
    assert all(re.search(word, text) for text in said for word in named)
