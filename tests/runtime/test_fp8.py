"""Moments in eight bits between steps: the same bits at every stage, bucket and world size; memory to the byte."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.distributed import run_ranks
from tests.support.on_ranks import on_ranks
from tests.support.optimizers import MIXES
from tests.support.training import digest, whole_weights
from zerokit import ZeroOptimizer
from zerokit.errors import UsageError
from zerokit.formulas import MemoryReport
from zerokit.runtime.homes import decode, encoded
from zerokit.runtime.moments import moments_of

STAGES: dict[int, list[Any]] = {1: [0, 3], 2: [0, 1, 2, 3], 4: [(0, 3), (1, 2), (3, 3)]}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(33, 70), nn.Sequential(nn.Linear(70, 50), nn.LayerNorm(50)), nn.ReLU(), nn.Linear(50, 9)
    )


def _groups(model: nn.Module, classes: str) -> Any:
    if classes in MIXES:
        return MIXES[classes](model)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return {
        "adamw": torch.optim.AdamW,
        "amsgrad": torch.optim.Adam,
        "momentum": torch.optim.SGD,
        "rmsprop": torch.optim.RMSprop,
        "both": {torch.optim.Muon: matrices, torch.optim.AdamW: rest},
    }[classes]


def _optimizer(
    model: nn.Module, stage: Any, classes: str, states: str = "fp8", **options: Any
) -> ZeroOptimizer:
    own: dict[str, dict[str, Any]] = {
        "momentum": {"lr": 0.1, "momentum": 0.9},
        "amsgrad": {"amsgrad": True},
        "rmsprop": {"centered": True, "momentum": 0.9},
    }
    options = {"precision": "fp32"} | own.get(classes, {}) | options
    if isinstance(stage, tuple):
        options["mesh"] = (2, dist.get_world_size() // 2)
    return ZeroOptimizer(model, _groups(model, classes), stage=stage, states=states, **options)


def _train(model: nn.Module, optimizer: ZeroOptimizer, steps: range) -> list[str]:
    """Equal batches on all ranks, so that sums over them agree at any world size that is a power of two."""
    losses = []
    for step in steps:
        batch = torch.randn(8, 33, generator=torch.Generator().manual_seed(step))
        loss = model(batch).float().square().mean()
        optimizer.backward(loss)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


CLASSES = ("adamw", "amsgrad", "momentum", "rmsprop", "both", "soap", "lamb")


def _trained(world: int, classes: str) -> list[tuple[list[str], str]]:
    found = []
    for stage, bucket in product(STAGES[world], (0.001, 1.0)):
        model = _model()
        optimizer = _optimizer(model, stage, classes, bucket_mb=bucket)
        losses = _train(model, optimizer, range(5))
        with optimizer.gathered():
            found.append((losses, digest(whole_weights(model).items())))
    return found


@pytest.mark.full(default=["adamw", "both"])
@pytest.mark.parametrize("classes", CLASSES)
def test_stages_buckets_and_world_sizes_give_the_same_bits(classes: str) -> None:
    found = [each for world in STAGES for rank in run_ranks(world, _trained, world, classes) for each in rank]
    assert all(each == found[0] for each in found)


def _of_whole_vectors() -> nn.Module:
    """A model whose parameters a kernel computes in vectors alone, however they lie in memory."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))


def _reference() -> tuple[list[str], str]:
    """Plain PyTorch, with every moment rounded after each step, parameter by parameter."""
    model = _of_whole_vectors()
    inner = torch.optim.AdamW(model.parameters(), fused=False, foreach=False)
    losses = []
    for step in range(5):
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        loss = model(batch).float().square().mean()
        loss.backward()
        inner.step()
        inner.zero_grad()
        losses.append(loss.item().hex())
        for parameter in model.parameters():
            for kind, value in moments_of(inner.state[parameter], parameter.shape):
                flat = value.view(-1)
                decode(encoded(kind, flat), flat)
    return losses, digest(whole_weights(model).items())


@on_ranks(1)
def test_each_parameter_has_blocks_of_its_own() -> None:
    model = _of_whole_vectors()
    optimizer = _optimizer(model, 2, "adamw", fused=False, foreach=False)
    losses = []
    for step in range(5):
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        loss = model(batch).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    assert (losses, digest(whole_weights(model).items())) == _reference()


def _accounts(world: int) -> list[tuple[MemoryReport, MemoryReport]]:
    found = []
    for stage, precision, classes in product(STAGES[world], ("fp32", "bf16"), CLASSES):
        model = _model()
        optimizer = _optimizer(model, stage, classes, precision=precision, bucket_mb=0.01)
        average = None if classes in ("both", *MIXES) else zerokit.Ema(optimizer)
        for step in range(2):
            _train(model, optimizer, range(step, step + 1))
            if average is not None:
                average.update()
        optimizer.backward(model(torch.randn(8, 33)).float().square().mean())
        found.append((optimizer.memory(), optimizer.predicted_memory()))
    return found


@pytest.mark.full(default="1")
@pytest.mark.parametrize("world", STAGES)
def test_memory_equals_the_formulas(world: int) -> None:
    for accounts in run_ranks(world, _accounts, world):
        assert len(accounts) == len(STAGES[world]) * 2 * len(CLASSES)
        for measured, predicted in accounts:
            assert measured == predicted
            assert measured.visiting > 0


@on_ranks(1)
def test_adam_s_moments_take_two_bytes_and_an_eighth() -> None:
    model = nn.Linear(640, 64, bias=False)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, states="fp8", precision="fp32")
    assert optimizer.memory().optimizer == 0
    optimizer.backward(model(torch.randn(4, 640)).square().mean())
    optimizer.step()
    assert optimizer.memory().optimizer == 2.125 * 640 * 64
    assert optimizer.memory().visiting == 8 * 640 * 64
    state = next(iter(optimizer.state.values()))
    assert state["exp_avg"].isnan().all()
    assert state["exp_avg"].untyped_storage().nbytes() == 4


@on_ranks(2, cases=(0, 1, 2, 3))
def test_states_go_and_come_back_with_the_same_bits(stage: int) -> None:
    model = _model()
    optimizer = _optimizer(model, stage, "adamw")
    _train(model, optimizer, range(3))
    state = optimizer.state_dict()
    assert all(not one["exp_avg"].isnan().any() for one in state["inner"]["state"].values())
    after = _train(model, optimizer, range(3, 6))
    optimizer.load_state_dict(state)
    assert _train(model, optimizer, range(3, 6)) == after
    other = _model()
    fresh = _optimizer(other, stage, "adamw")
    fresh.load_state_dict(state)
    assert _train(other, fresh, range(3, 6)) == after


@on_ranks(2, cases=(0, 2, 3))
def test_a_skipped_step_changes_no_state(stage: int) -> None:
    model = _model()
    optimizer = _optimizer(model, stage, "adamw", precision="fp16")
    _train(model, optimizer, range(3))
    before = optimizer.state_dict()["inner"]["state"]
    loss = model(torch.full((8, 33), 1e4)).float().square().sum() * float("inf")
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    after = optimizer.state_dict()["inner"]["state"]
    assert optimizer.skipped_steps == 1
    for number, one in before.items():
        for kind, value in one.items():
            assert torch.equal(value, after[number][kind])


def _frozen(stage: int) -> list[str]:
    model = _model()
    optimizer = _optimizer(model, stage, "adamw")
    losses = _train(model, optimizer, range(2))
    for parameter in model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    model[1][0].bias.requires_grad_(False)  # type: ignore[index]
    losses += _train(model, optimizer, range(2, 5))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return losses + _train(model, optimizer, range(5, 7))


def test_freezing_keeps_blocks() -> None:
    found = [rank for stage in range(4) for rank in run_ranks(2, _frozen, stage)]
    assert all(each == found[0] for each in found)


@on_ranks(2, cases=(0, 2, 3))
def test_averages_and_weights_are_not_encoded(stage: int) -> None:
    model = _model()
    optimizer = _optimizer(model, stage, "adamw")
    average, expected = zerokit.Ema(optimizer, 0.5), None
    for step in range(4):
        _train(model, optimizer, range(step, step + 1))
        average.update()
        with optimizer.gathered():
            now = [parameter.detach().clone() for parameter in model.parameters()]
        expected = (
            now if expected is None else [torch.lerp(a, b, 0.5) for a, b in zip(expected, now, strict=True)]
        )
    with average.applied(), optimizer.gathered():
        assert expected is not None
        for parameter, own in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), own, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_what_cannot_be_encoded_is_refused() -> None:
    def made(model: nn.Module, optimizer_class: Any, **options: Any) -> ZeroOptimizer:
        return ZeroOptimizer(model, optimizer_class, states="fp8", **options)

    with pytest.raises(
        UsageError, match="encodes moments, and Adagrad keeps none in float32 by a known name"
    ):
        made(_model(), torch.optim.Adagrad)
    precision = zerokit.Precision(compute=torch.bfloat16, master=torch.bfloat16)
    with pytest.raises(
        UsageError, match=r"beside masters in torch\.bfloat16 moments are torch\.bfloat16: use"
    ):
        made(_model(), torch.optim.AdamW, precision=precision)
    blocks = {"weight": 3}
    with pytest.raises(
        UsageError, match=r"row_blocks= begins a tensor .* within them: choose blocks of rows"
    ):
        made(nn.Linear(10, 6, bias=False), torch.optim.Muon, row_blocks=blocks)
    made(nn.Linear(32, 6, bias=False), torch.optim.Muon, row_blocks=blocks)
