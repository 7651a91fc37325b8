"""States on a disk, for models and loops of every kind: the very bits of a run that keeps them on the device."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.runtime.test_parity import assert_equal_bits
from tests.support.distributed import run_ranks
from tests.support.on_ranks import on_ranks
from tests.support.training import LARGE, Run, digest, mixed, train_zero, whole_weights

STAGES = (0, 1, 2, 3)
BF16: dict[str, Any] = {"precision": "bf16"}
FP16: dict[str, Any] = {"precision": "fp16"}
SQUARE: dict[str, Any] = {"mesh": (2, 2), "steps": 4}
PURE = zerokit.Precision("bf16", "bf16", "bf16")


def _runs(world: int) -> list[tuple[str, Run]]:
    """Models and ways to train them: what differs by stage on two ranks, and a few elsewhere."""
    if world == 1:
        return [
            ("gpt", Run(stage=2, steps=4, clip=0.3)),
            ("odd_shapes", Run(stage=3, steps=4, optimizer="muon", **BF16)),
        ]
    if world == 3:
        return [
            ("tiny_parameters", Run(stage=2, steps=5, optimizer="momentum", clip=0.1)),
            ("tiny_parameters", Run(stage=3, steps=5, optimizer="muon", **BF16)),
            ("gpt_groups", Run(stage=1, steps=4, **FP16)),
        ]
    if world == 4:
        return [
            ("gpt", Run(stage=(0, 3), clip=0.3, **SQUARE)),
            ("tiny_parameters", Run(stage=(1, 3), **SQUARE, **BF16)),
            ("odd_shapes", Run(stage=(1, 3), optimizer="muon", **SQUARE, **BF16)),
            ("gpt", Run(stage=(2, 2), optimizer="soap", **SQUARE)),
            ("unit_unused_on_one_rank", Run(stage=3, steps=4, **FP16)),
        ]
    runs = []
    for stage in STAGES:
        runs += [
            ("gpt", Run(stage=stage, steps=5, clip=0.3)),
            ("odd_shapes", Run(stage=stage, steps=4, optimizer="muon", micro=2, accumulate=True, **BF16)),
        ]
    return [
        *runs,
        # States that a class makes late, replaces by others, or has in lists; matrices in an order of their own.
        ("gpt", Run(stage=2, steps=8, optimizer="soap", bucket_mb=LARGE)),
        ("gpt", Run(stage=3, steps=5, optimizer="soap", **BF16)),
        ("odd_shapes", Run(stage=1, steps=4, optimizer="adafactor")),
        ("gpt", Run(stage=3, steps=4, optimizer="lamb", **FP16)),
        ("tied_inside", Run(stage=2, steps=4, optimizer="adam", **FP16)),
        ("lora", Run(stage=3, steps=4, optimizer="momentum", **BF16)),
        ("tiny_parameters", Run(stage=3, steps=4, optimizer="rmsprop", micro=2)),
        ("gpt", Run(stage=2, steps=4, optimizer="sgd", **BF16)),
        ("gpt", Run(stage=2, steps=4, optimizer="adagrad", precision=PURE)),
        ("unit_unused_on_one_rank", Run(stage=2, steps=4, optimizer="lion", plain_backward=True)),
        ("odd_shapes", Run(stage=mixed("odd_shapes", 3, 0, 2), steps=4, optimizer="muon")),
    ]


@pytest.mark.full(default="[13]")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_losses_norms_and_weights_have_the_bits_of_states_on_the_device(world: int, tmp_path: Path) -> None:
    runs = _runs(world)
    for rank, results in enumerate(run_ranks(world, _both, runs, tmp_path)):
        for (name, run), (found, expected) in zip(runs, results, strict=True):
            assert_equal_bits(found, expected, f"rank {rank}, {name}, {run}")
            assert len(set(found.losses)) > 2


def _both(runs: list[tuple[str, Run]], folder: Path) -> list[Any]:
    found = []
    for name, run in runs:
        found.append((train_zero(name, run, states=folder), train_zero(name, run)))
        assert not list(folder.iterdir())
    return found


class Net(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(11, 24), nn.Linear(24, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)) for _ in range(4)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


def _loss(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    loss: Tensor = model(torch.randint(0, 11, (6,), generator=generator))
    return loss


def _classes(model: nn.Module, optimizer: str) -> Any:
    if optimizer == "adamw":
        return torch.optim.AdamW
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    rest = [p for name, p in model.named_parameters() if p.dim() < 2 or "blocks" not in name]
    return {
        torch.optim.Muon: [{"params": matrices, "lr": 0.02}],
        torch.optim.AdamW: [{"params": rest, "lr": 3e-3}],
    }


def _make(states: str | Path, stage: Any, **options: Any) -> tuple[Any, zerokit.ZeroOptimizer]:
    model = Net()
    cls = _classes(model, options.pop("optimizer", "muon"))
    options = dict[str, Any](precision="fp32", bucket_mb=0.005) | options
    return model, zerokit.ZeroOptimizer(model, cls, stage=stage, states=states, **options)


def _step(model: nn.Module, optimizer: zerokit.ZeroOptimizer, number: int) -> None:
    optimizer.backward(_loss(model, number))
    optimizer.step()
    optimizer.zero_grad()


def _weights(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> str:
    """A digest of masters and parameters."""
    return digest(optimizer.weights(torch.float32)) + digest(whole_weights(model).items())


def _freezing(states: Any, stage: int) -> str:
    """A module, and half of one, stop and go on: their masters are divided."""
    model, optimizer = _make(states, stage, optimizer="adamw")
    for number in range(7):
        if number in (2, 5):
            for module in (model.blocks[1], model.blocks[2][0], model.head):
                for parameter in [*module.parameters()][number == 3 :]:
                    parameter.requires_grad_(number == 5)
        if number == 3:
            model.blocks[0][0].bias.requires_grad_(False)
        _step(model, optimizer, number)
    return _weights(model, optimizer)


def _changes(states: Any, stage: int) -> str:
    model, optimizer = _make(states, stage, precision="bf16")
    for number in range(6):
        _step(model, optimizer, number)
        with torch.no_grad():
            if number == 1:
                with optimizer.gathered():
                    model.blocks[1][0].weight.mul_(0.5)
                    model.blocks[2][2].weight[:3] = 1
                    model.head.weight.copy_(torch.full((5, 24), 1 / 3))
            if number == 2 and stage < 3:
                model.table.weight.mul_(0.75)
            if number == 3:
                with optimizer.gathered(source=1):
                    if dist.get_rank() == 1:
                        model.blocks[0][0].weight.zero_()
            if number == 4:
                model.load_state_dict({k: v * 0.875 for k, v in model.state_dict().items()})
    return _weights(model, optimizer)


def _counts(states: Any, stage: int) -> str:
    """Sums over samples with an overflow on one rank, clipped; a rank without any sample; a step without gradient."""
    model, optimizer = _make(states, stage, precision="fp16")
    for number in range(6):
        with optimizer.accumulate():
            optimizer.backward(_loss(model, number) * 24, count=4)
        optimizer.backward(_loss(model, number + 9) * 6, count=6 * dist.get_rank())
        if number == 3:
            factor = float("inf") if dist.get_rank() == 0 else 1.0
            optimizer.backward(_loss(model, number) * factor, count=1)
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.skipped_steps >= 1
    return _weights(model, optimizer)


def _skips(states: Any, stage: int) -> str:
    model, optimizer = _make(states, stage, precision="bf16", on_nonfinite="skip")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for number in range(6):
        factor = float("nan") if number in (0, 3) and dist.get_rank() == 1 else 1.0
        optimizer.backward(_loss(model, number) * factor)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert optimizer.skipped_steps == 2
    return _weights(model, optimizer)


def _average(states: Any, stage: int) -> str:
    model, optimizer = _make(states, stage, precision="bf16")
    average, found = zerokit.Ema(optimizer, 0.75), ""
    for number in range(8):
        _step(model, optimizer, number)
        average.update()
        if number == 5:
            average.restart()
        if number in (2, 4, 7):
            with average.applied():
                found += _weights(model, optimizer)
                if number == 4:
                    with optimizer.gathered(), torch.no_grad():
                        model.head.bias.add_(1)
    return found + _weights(model, optimizer)


def _state_dicts(states: Any, stage: int) -> str:
    model, optimizer = _make(states, stage)
    for number in range(3):
        _step(model, optimizer, number)
    kept = io.BytesIO()
    torch.save(optimizer.state_dict(), kept)
    found = []
    for again in range(3):
        if again:
            if again == 2:
                model, optimizer = _make(states, stage)
            kept.seek(0)
            optimizer.load_state_dict(torch.load(kept, weights_only=True))
        for number in range(3, 6):
            _step(model, optimizer, number)
        found.append(_weights(model, optimizer))
    assert found[0] == found[1] == found[2]
    return found[0]


def _shown_gradients(states: Any, stage: int) -> str:
    model, optimizer = _make(states, stage)
    for number in range(4):
        optimizer.backward(_loss(model, number))
        with optimizer.gathered_gradients():
            gradient = model.blocks[1][0].weight.grad
            assert gradient is not None
            gradient.mul_(0.25)
        optimizer.step()
        optimizer.zero_grad()
    return _weights(model, optimizer)


LOOPS: tuple[Callable[[Any, int], str], ...] = (
    _freezing,
    _changes,
    _counts,
    _skips,
    _average,
    _state_dicts,
    _shown_gradients,
)


@on_ranks(2, cases=LOOPS)
def test_what_a_user_does_between_steps_has_the_same_bits(
    loop: Callable[[Any, int], str], tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", zerokit.errors.ZerokitWarning)  # of steps that are left out
        found = {(states, stage): loop(states, stage) for states in ("device", tmp_path) for stage in STAGES}
    for stage in STAGES:
        assert found[tmp_path, stage] == found["device", stage], stage
    assert not list(tmp_path.iterdir())
