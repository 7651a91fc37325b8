"""A stage for each module: what ranks hold, checkpoints between mixes, whole values, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.support.distributed import run_ranks
from tests.support.models import CASES
from tests.support.on_ranks import on_ranks
from tests.support.training import (
    SMALL,
    Run,
    Trajectory,
    build_seeded,
    digest,
    mixed,
    one_step,
    trained,
    whole_weights,
    wrap,
)
from zerokit.runtime.use import State

MIXES = {name: [mixed(name, 3, 2), mixed(name, 0, 3, 1)] for name in ("gpt", "lora")}


def _go_on(name: str, run: Run, source: str | None, steps: range, target: str | None = None) -> list[str]:
    """The bits of these steps, from what is saved at `source`; then everything is saved at `target`."""
    model = build_seeded(CASES[name], dist.get_rank())
    optimizer = wrap(model, CASES[name], run)
    if source is not None:
        zerokit.load(source, optimizer)
    trajectory = Trajectory()
    for step in steps:
        one_step(model, optimizer, CASES[name], run, step, trajectory)
    if target is not None:
        zerokit.save(target, optimizer, step=steps.stop)
    trajectory.weights = digest(whole_weights(model).items())
    return trajectory.bits()


def _save_each(folder: str, base: Run) -> None:
    for name, mixes in MIXES.items():
        bits = [
            _go_on(name, replace(base, stage=stage), None, range(2), f"{folder}/{name}/{number}")
            for number, stage in enumerate([2, *mixes])
        ]
        assert bits[1:] == bits[:1] * 2, name


def _load_each(folder: str, base: Run, mesh: Any) -> None:
    for name, mixes in MIXES.items():
        stages: list[Any] = [0, *mixes] if mesh is None else [(0, 3), mixed(name, (0, 3), (1, 2), (3, 3))]
        bits = [
            _go_on(name, replace(base, stage=stage, mesh=mesh), f"{folder}/{name}/{number}", range(2, 4))
            for number in range(3)
            for stage in stages
        ]
        assert bits[1:] == bits[:1] * (len(bits) - 1), name


@pytest.mark.full(default="by module")
@pytest.mark.parametrize("precision", ["fp32", {"blocks.1": "fp32", "*": "bf16"}], ids=["fp32", "by module"])
def test_checkpoints_move_between_mixes_and_ranks(tmp_path: Path, precision: Any) -> None:
    """What any mix saved goes on at any other, on 3 ranks and on two axes; tools read it."""
    base = Run(precision=precision, clip=0.5, bucket_mb=SMALL)
    run_ranks(2, _save_each, str(tmp_path), base)
    run_ranks(3, _load_each, str(tmp_path), base, None)
    run_ranks(4, _load_each, str(tmp_path), base, (2, 2))
    for name in MIXES:
        whole = []
        for number in range(3):
            source = tmp_path / name / str(number)
            zerokit.reshard(source, 3, tmp_path / name / f"{number}-on-3")
            assert not zerokit.verify(tmp_path / name / f"{number}-on-3").findings
            checkpoint = zerokit.Checkpoint(tmp_path / name / f"{number}-on-3")
            parameters = sorted(checkpoint.layout.parameters, key=lambda one: one.name)
            streams = ("master", "exp_avg", "exp_avg_sq")
            whole.append(
                {
                    (stream, p.name): torch.as_tensor(checkpoint.read(stream, p.name))
                    for p in parameters
                    for stream in (streams if p.trainable else ("param",))
                }
            )
        for other in whole[1:]:
            assert other.keys() == whole[0].keys()
            assert all(torch.equal(other[key], value) for key, value in whole[0].items())


class Backbone(nn.Module):
    """A frozen stack of layers, and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        self.head = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        self.backbone.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.backbone(x).relu())
        return hidden


@on_ranks(2)
def test_a_frozen_backbone_is_cut_beside_a_head_that_stays_whole() -> None:
    """Memory is that of stage 3 for the one and of stage 2 for the other; only the backbone is gathered."""
    held, moved = {}, {}
    stages: dict[str, Any] = {"3": 3, "2": 2, "mixed": {"backbone": 3, "*": 2}}
    for label, stage in stages.items():
        model = Backbone()
        optimizer = zerokit.ZeroOptimizer(
            model, torch.optim.AdamW, stage=stage, precision="fp32", bucket_mb=SMALL
        )
        for _ in range(3):
            optimizer.backward(model(torch.randn(4, 64)).square().mean())
            held[label] = optimizer.memory()
            optimizer.step()
            optimizer.zero_grad()
        moved[label] = optimizer.traffic().by_operation["all_gather"]
        if label == "mixed":
            assert optimizer.stage == {f"backbone.{n}": 3 for n in range(6)} | {"head.0": 2, "head.2": 2}
            own = [(unit.comes_and_goes, unit.unit.trainable) for unit in optimizer.runtime.units]
            assert set(own) == {(True, False), (False, True)}
            assert all(u.state is State.FREED for u in optimizer.runtime.units if u.comes_and_goes)
            model.get_parameter("head.0.weight").sum().item()  # whole, as at stage 2
            with pytest.raises(zerokit.UsageError, match=re.escape("gathered()")):
                model.get_parameter("backbone.0.weight").sum()
            again = zerokit.ZeroOptimizer(
                Backbone(), torch.optim.AdamW, stage=optimizer.stage, precision="fp32", bucket_mb=SMALL
            )
            assert again.layout == optimizer.layout
            assert again.stage == optimizer.stage
    assert held["mixed"].frozen == held["3"].frozen < held["2"].frozen
    assert held["mixed"].parameters == held["2"].parameters > held["3"].parameters
    for line in ("gradients", "optimizer", "buckets"):
        assert getattr(held["mixed"], line) == getattr(held["2"], line), line
    frozen, head = 6 * (64 * 64 + 64), 64 * 64 + 64 + 64 * 8 + 8
    # The last of the backbone stays for backward, which needs none of it.
    assert head + frozen <= moved["mixed"].elements <= head + 2 * frozen
    assert moved["2"].elements == head


@on_ranks(2)
def test_whole_values_are_those_of_one_stage() -> None:
    """`gathered()`, `gathered_gradients()`, `weights()`, `state_dict()` and changes, at a mix as at stage 2."""
    found = []
    for stage in (2, mixed("gpt", 3, 0, 2), mixed("gpt", 1, 3)):
        case, model, optimizer = trained("gpt", Run(stage=stage, precision="bf16"), 2)
        optimizer.backward(case.loss(model, case.batch(0, 9, dist.get_rank())))
        seen: list[Tensor] = []
        with optimizer.gathered_gradients():
            for parameter in model.parameters():
                assert parameter.grad is not None
                seen.append(parameter.grad.clone())
                parameter.grad *= 0.5
        optimizer.step()
        with optimizer.gathered(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        seen += [weight for _, weight in sorted(optimizer.weights())]
        seen += [value.clone() for _, value in sorted(model.state_dict().items())]
        state = {name: value * 2 for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        optimizer.zero_grad()
        optimizer.backward(case.loss(model, case.batch(0, 10, dist.get_rank())))
        optimizer.step()
        seen += [weight for _, weight in sorted(optimizer.weights())]
        found.append(seen)
        part = optimizer.state_dict()
        optimizer.load_state_dict(part)
        zerokit.release(model)
        seen += [parameter.detach() for _, parameter in sorted(model.named_parameters())]
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@on_ranks(2)
def test_what_is_refused() -> None:
    def build(stage: Any, **options: Any) -> zerokit.ZeroOptimizer:
        return zerokit.ZeroOptimizer(Backbone(), torch.optim.AdamW, stage=stage, **options)

    for stage, words in (
        (
            {"backbon": 3, "*": 2},
            "stage: 'backbon' is no module of the model, but 'backbone', 'backbone.5', 'backbone.4' is",
        ),
        ({"backbone": 3}, "stage: no key covers head.0.weight: add '*' for the rest"),
        ({"backbone": 4, "*": 2}, "stage 4 is unknown"),
        ({"backbone": (0, 3), "*": 2}, "names two axes, but the mesh has one"),
        ({"backbone": ("local", 3), "*": 2}, "the outer axis is 'local' for all modules or for none"),
        (lambda path: "3", "stage '3' is unknown"),
    ):
        with pytest.raises(zerokit.UsageError, match=re.escape(words)):
            build(stage)
    with pytest.raises(zerokit.LayoutMismatch, match="stage"):
        build({"backbone": 3 - dist.get_rank(), "*": 1}, bucket_mb=SMALL)
    assert build({"backbone": (1, 3), "*": (2, 2)}, mesh=(1, 2)).stage == build({"backbone": 3, "*": 2}).stage
    assert build({"head": 2, "backbone": 2}).stage == 2
