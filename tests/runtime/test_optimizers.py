"""Optimizers and parameter groups: a real `torch.optim.Optimizer` in front of flat shards."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import zerokit
from tests.runtime.test_parity import assert_equal_bits
from tests.support.distributed import run_alone, run_each, run_ranks
from tests.support.on_ranks import on_ranks
from tests.support.optimizers import MIXES, OPTIMIZERS
from tests.support.oracle import train_alone
from tests.support.training import SMALL, Run, Trajectory, digest, one_step, train_all, trained, whole_weights
from zerokit.runtime.trials import choose_kernel, probe

RUN = Run(steps=5, clip=math.inf)


def _alone() -> dict[str, list[Trajectory]]:
    return {name: train_alone("gpt_groups", replace(RUN, optimizer=name), 2) for name in OPTIMIZERS}


def _by_stages() -> dict[str, dict[str, Trajectory]]:
    found = {}
    for turn, name in enumerate(OPTIMIZERS):
        run = replace(RUN, optimizer=name)
        stages = {s: replace(run, stage=s, bucket_mb=0.004 if s % 2 else SMALL) for s in (turn % 3, 3)}
        found[name] = train_all("gpt_groups", {f"stage {stage}": one for stage, one in stages.items()})
    return found


def test_stages_equal_one_process_in_bits() -> None:
    """Stage 3 and another by turns, with parameter groups of different learning rates and weight decays."""
    alone = run_alone(_alone)
    for rank, results in enumerate(run_ranks(2, _by_stages)):
        for name, stages in results.items():
            for label, result in stages.items():
                assert_equal_bits(
                    result, alone[name][rank], f"{name}, rank {rank}, {label} against one process"
                )


def _begun_late(given: tuple[str, int]) -> list[str]:
    """A unit gets its states later than the rest, and but for SGD a part of one, too."""
    name, stage = given
    case, model, optimizer = trained("mlp_10_64_2", Run(stage=stage, optimizer=name))
    trajectory = Trajectory()
    first, *_, last = list(model.children())
    late = [
        *last.parameters(),
        *([] if OPTIMIZERS[name][0] is torch.optim.SGD else [first.get_parameter("weight")]),
    ]
    for step in range(5):
        for parameter in late:
            parameter.requires_grad_(step > 1)
        one_step(model, optimizer, case, Run(), step, trajectory)
    trajectory.weights = digest(whole_weights(model).items())
    return trajectory.bits()


def test_states_may_begin_late() -> None:
    cases = list(itertools.product(OPTIMIZERS, range(4)))
    found = dict(zip(cases, run_each(2, _begun_late, cases), strict=True))
    assert [case for case in cases if found[case] != found[case[0], 0]] == []


@on_ranks(2)
def test_its_surface_is_that_of_torchs_optimizers() -> None:
    case, model, optimizer = trained("gpt_groups", Run(stage=2), 1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert "AdamW" in repr(optimizer)
    assert type(optimizer).no_sync is type(optimizer).accumulate
    assert optimizer.defaults["lr"] == 3e-3
    assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 2e-3]
    assert [group["fused"] for group in optimizer.param_groups] == [True, True], "torch offers it for AdamW"
    before = digest(whole_weights(model).items())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    one_step(model, optimizer, case, Run(), 1, Trajectory())
    assert digest(whole_weights(model).items()) == before, (
        "a rate set in param_groups did not reach the optimizer"
    )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in optimizer.state} <= held
    assert {kind for state in optimizer.state.values() for kind in state} == {"exp_avg", "exp_avg_sq", "step"}


RESUMED = [("adamw", "gpt_groups"), ("lion", "gpt_groups"), *((mix, "odd_shapes") for mix in MIXES)]


@on_ranks(2, itertools.product(range(4), RESUMED))
def test_state_dicts_resume_a_run_bit_for_bit(given: tuple[int, tuple[str, str]]) -> None:
    """Model and optimizer state dicts carry a run into new objects on the same ranks, scheduler included."""
    stage, (name, built) = given
    run = Run(stage=stage, optimizer=name, bucket_mb=SMALL)
    case, model, optimizer = trained(built, run, 4)
    scheduler = StepLR(optimizer, 2)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()), file)
    file.seek(0)
    weights, state, schedule = torch.load(file, weights_only=True)

    _, other, resumed = trained(built, run, 1)
    later = StepLR(resumed, 2)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    later.load_state_dict(schedule)
    one, two = Trajectory(), Trajectory()
    for step in range(4, 9):
        one_step(model, optimizer, case, run, step, one)
        one_step(other, resumed, case, run, step, two)
        scheduler.step()
        later.step()
    assert one.losses == two.losses
    assert digest(whole_weights(model).items()) == digest(whole_weights(other).items())


CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Picky(torch.optim.SGD):
    """An optimizer that accepts `fused=True` and raises `error` in its first step with it."""

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


@pytest.mark.parametrize("master", [torch.bfloat16, torch.float16])
def test_momentum_in_half_precision_is_right(master: torch.dtype) -> None:
    """That of PyTorch's fused kernel on hosts is wrong by its own size."""
    start, *gradients = torch.randn(4, 200, generator=torch.Generator().manual_seed(0)).to(master)
    options = {"lr": 0.1, "momentum": 0.9}
    moments = []
    for chosen in (choose_kernel(torch.optim.SGD, options, CPU, master), {**options, "foreach": False}):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.SGD([parameter], **chosen)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        moments.append(optimizer.state[parameter]["momentum_buffer"])
    torch.testing.assert_close(*moments)


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
