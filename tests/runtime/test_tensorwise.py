"""Optimizers that look at whole tensors: the same bits at every stage, and what plain torch gives on one process."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Muon

import zerokit
from tests.runtime.patterns import engines
from tests.runtime.patterns.catalogue import PATTERNS
from tests.runtime.patterns.engines import Setting
from tests.runtime.patterns.running import try_out
from tests.runtime.test_counts import PAIRS
from tests.runtime.test_parity import assert_equal_bits, relative
from tests.support.distributed import run_alone, run_ranks
from tests.support.models import CASES
from tests.support.on_ranks import on_ranks
from tests.support.optimizers import MIXES, Classes
from tests.support.oracle import train_alone
from tests.support.training import (
    LARGE,
    SMALL,
    Run,
    Trajectory,
    build_seeded,
    digest,
    draw,
    mixed,
    one_step,
    train_all,
    train_zero,
    trained,
    whole_weights,
)

STAGES = (0, 1, 2, 3)
NAMES = list(MIXES)
TWENTY, SHORT = Run(steps=20, clip=math.inf), Run(steps=5, clip=math.inf)
#: The first one is trained for 20 steps, on two ranks also the second, and of the others two by turns.
MODELS = (
    "odd_shapes",
    "gpt",
    "resnet",
    "tied_inside",
    "tiny_parameters",
    "unit_unused_on_one_rank",
    "lora",
    "bert",
)
LOOPS = {
    "clipped": Run(clip=0.3, steps=5),
    "accumulated": Run(clip=math.inf, micro=3, accumulate=True, steps=4),
    "several passes": Run(clip=0.3, micro=2, steps=4),
    "bf16": Run(clip=0.3, precision="bf16", steps=5),
    "fp16": Run(clip=0.3, precision="fp16", steps=5),
    "a bf16 wire": Run(precision=zerokit.Precision(wire="bf16"), steps=4),
    "bf16 masters": Run(precision=zerokit.Precision("bf16", "bf16", "bf16"), steps=4),
}
#: Ranks on which one process gives the same bits; where one sums differently, 1/N must be a power of two.
EXACT = {"plain": (1, 2, 3, 4), "clipped": (1, 2, 4), "accumulated": (1, 2, 4)}


def _sets(mix: str, world: int) -> dict[tuple[str, str], Run]:
    """Runs by model and loop: all loops on two ranks, a third of them elsewhere."""
    turn = NAMES.index(mix) + world
    others = [MODELS[2 + (2 * turn + number) % (len(MODELS) - 2)] for number in range(2)]
    sets = {(MODELS[0], "plain"): TWENTY, (MODELS[1], "plain"): TWENTY if world == 2 else SHORT}
    sets |= {(name, "plain"): SHORT for name in others}
    for number, (loop, run) in enumerate(LOOPS.items()):
        if world == 2 or (turn + number) % 3 == 0:
            sets[MODELS[(turn + number) % 4], loop] = run
    return {key: replace(run, optimizer=mix) for key, run in sets.items()}


def _stages(mix: str, world: int) -> dict[tuple[str, str], dict[str, Trajectory]]:
    found = {}
    for (name, loop), run in _sets(mix, world).items():
        ways = {f"stage {stage}": replace(run, stage=stage, bucket_mb=SMALL) for stage in STAGES}
        if world == 2 or loop == "plain":
            ways["joined"] = replace(run, stage=2 + world % 2, bucket_mb=LARGE)
            ways["by module"] = replace(run, stage=mixed(name, 3, 0, 2))
        found[name, loop] = train_all(name, ways)
    return found


def _alone(mix: str, world: int) -> dict[tuple[str, str], list[Trajectory]]:
    sets = _sets(mix, world).items()
    return {key: train_alone(key[0], run, world) for key, run in sets if world in EXACT.get(key[1], ())}


@pytest.mark.full(default=["muon-2", "soap-1"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("mix", NAMES)
def test_stages_are_equal_bits_and_equal_one_process(mix: str, world: int) -> None:
    alone = run_alone(_alone, mix, world)
    for rank, sets in enumerate(ranks := run_ranks(world, _stages, mix, world)):
        for key, results in sets.items():
            first = results["stage 0"]
            for label, found in results.items():
                assert_equal_bits(found, first, f"rank {rank}, {key}, {label}")
            assert first.weights == ranks[0][key]["stage 0"].weights, f"ranks diverge: {key}"
            if key in alone:
                assert_equal_bits(first, alone[key][rank], f"rank {rank}, {key} against one process")


@pytest.mark.full(default="muon")
@pytest.mark.parametrize("mix", NAMES)
def test_pairs_of_stages_are_equal_bits_on_a_mesh(mix: str) -> None:
    for name, run in (("odd_shapes", TWENTY), ("gpt", replace(LOOPS["several passes"], steps=20))):
        run = replace(run, optimizer=mix)
        ways = {str(pair): replace(run, stage=pair, mesh=(2, 2), bucket_mb=SMALL) for pair in PAIRS}
        ways["joined"] = replace(ways["(0, 3)"], bucket_mb=LARGE)
        ranks = run_ranks(4, train_all, name, ways | {"one axis": replace(run, stage=3)})
        for rank, results in enumerate(ranks):
            flat, first = results.pop("one axis"), results["(0, 3)"]
            for label, found in results.items():
                assert_equal_bits(found, first, f"rank {rank}, {name}, {label}")
            assert first.weights == ranks[0]["(0, 3)"].weights
            if mix in ("adafactor", "lamb"):  # the others make much of a last bit of a gradient
                assert relative(first.losses, flat.losses) <= 2e-6


#: What plain torch's own results move by as much in, where gradients move by a last bit; and a scheduler that asks for
#: momentum.
SENSITIVE = ("library.encoder", "library.batch_norm", "loops.schedulers")
KEYS = [
    key
    for key, pattern in PATTERNS.items()
    if pattern.world == 2 and not pattern.apart and "every" not in pattern.options and key not in SENSITIVE
]


@pytest.mark.full(default="[025]")
@pytest.mark.parametrize("part", range(8))
def test_ways_to_train_that_people_use(part: int) -> None:
    """Each eighth pattern, at stage 3 and another by turns."""
    jobs = []
    for turn, key in enumerate(KEYS[part::64]):
        optimizer = ("lamb", "adafactor")[turn % 2]
        jobs += [(key, Setting(stage, engines.SMALL, optimizer)) for stage in (turn % 3, 3)]
    assert try_out(jobs) == ""


# ---- how classes and parameters are given


def _make(model: nn.Module, classes: Any, **options: Any) -> zerokit.ZeroOptimizer:
    return zerokit.ZeroOptimizer(model, classes, precision="fp32", bucket_mb=SMALL, **options)


def _forms(model: nn.Module) -> dict[str, dict[Any, Any]]:
    """One training, given in several ways."""
    (matrices,), (rest,) = MIXES["muon"](model).values()
    named = dict(model.named_parameters())
    hidden = [name for name, p in named.items() if any(p is other for other in matrices["params"])]
    others = [name for name in named if name not in hidden]
    muon, adamw = functools.partial(Muon, lr=0.02), functools.partial(AdamW, lr=3e-3, weight_decay=0.05)
    return {
        "groups": {Muon: [matrices], AdamW: [rest]},
        "tensors": {muon: matrices["params"], adamw: rest["params"]},
        "iterators": {muon: iter(matrices["params"]), adamw: (p for p in rest["params"])},
        "names": {muon: hidden, adamw: others},
        "pairs": {
            muon: [(name, named[name]) for name in hidden],
            adamw: [(name, named[name]) for name in others],
        },
        "groups of names": {Muon: [{**matrices, "params": hidden}], AdamW: [{**rest, "params": others}]},
        "a group for each": {Muon: [{**matrices, "params": [name]} for name in hidden], AdamW: [rest]},
    }


@on_ranks(2)
def test_parameters_may_be_tensors_names_pairs_or_groups() -> None:
    case, run = CASES["gpt"], Run(clip=0.3)
    bits = {}
    for label in _forms(case.build()):
        model = build_seeded(case, dist.get_rank())
        optimizer = _make(model, _forms(model)[label])
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [0.02] * (12 if label == "a group for each" else 1) + [3e-3], label
        trajectory = Trajectory()
        for step in range(3):
            one_step(model, optimizer, case, run, step, trajectory)
        trajectory.weights = digest(whole_weights(model).items())
        bits[label] = trajectory.bits()
    assert [label for label in bits if bits[label] != bits["groups"]] == []


class _Rows(torch.optim.Optimizer):
    """Muon over the row blocks of each parameter, as views of their own."""

    blocks: Any = 3

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        rows = [
            p.detach().split(list(self.cut(len(p)))) for group in self.param_groups for p in group["params"]
        ]
        self.views = [[nn.Parameter(block) for block in blocks] for blocks in rows]
        self.inner = Muon([view for views in self.views for view in views], lr=self.param_groups[0]["lr"])

    def cut(self, rows: int) -> tuple[int, ...]:
        return (rows // 3,) * 3 if self.blocks == 3 else self.blocks

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        tensors = [p for group in self.param_groups for p in group["params"]]
        for parameter, views in zip(tensors, self.views, strict=True):
            for view, gradient in zip(views, parameter.grad.split([len(v) for v in views]), strict=True):
                view.grad = gradient
        self.inner.step()


class _UnevenRows(_Rows):
    blocks = (10, 49, 1)


BLOCKS = {"attention.qkv.weight": 3, "mlp.0.weight": (10, 49, 1)}


def _by_blocks(model: nn.Module) -> Classes:
    """What `row_blocks=BLOCKS` is for `MIXES["muon"]`."""
    (matrices,), (rest,) = MIXES["muon"](model).values()
    names = {p: name for name, p in model.named_parameters()}
    found: dict[Any, list[Any]] = {_Rows: [], _UnevenRows: [], Muon: []}
    for parameter in matrices["params"]:
        name = names[parameter]
        kind = (
            _Rows if name.endswith("qkv.weight") else _UnevenRows if name.endswith("mlp.0.weight") else Muon
        )
        found[kind].append(parameter)
    return {cls: [{"params": members, "lr": 0.02}] for cls, members in found.items()} | {AdamW: [rest]}


def _alone_by_blocks(run: Run) -> list[Trajectory]:
    MIXES["muon by blocks"] = _by_blocks
    return train_alone("gpt", replace(run, optimizer="muon by blocks"), 2)


def _by_blocks_at_stages(run: Run) -> list[Trajectory]:
    return [train_zero("gpt", replace(run, stage=stage), row_blocks=BLOCKS) for stage in STAGES]


def test_row_blocks_are_matrices_of_their_own() -> None:
    """As views of their own are in plain torch."""
    run = Run(optimizer="muon", clip=0.3, steps=5)
    alone = run_alone(_alone_by_blocks, run)
    for rank, found in enumerate(run_ranks(2, _by_blocks_at_stages, run)):
        for stage in STAGES:
            assert_equal_bits(found[stage], alone[rank], f"rank {rank}, stage {stage}")


# ---- what meets them


@on_ranks(2, NAMES)
def test_freezing_and_skipped_steps_and_averages_have_equal_bits(mix: str) -> None:
    """Some matrices begin late, some are frozen for a while, one rank's gradients are inf at times."""
    bits = []
    for stage in STAGES:
        run = Run(stage=stage, optimizer=mix, clip=0.3)
        case, model, optimizer = trained("gpt", run)
        average = zerokit.Ema(optimizer, 0.8)
        trajectory = Trajectory()
        late, paused = (
            model.get_parameter("blocks.0.mlp.0.weight"),
            model.get_parameter("blocks.1.mlp.0.weight"),
        )
        for step in range(7):
            late.requires_grad_(step > 1)
            paused.requires_grad_(step not in (3, 4))
            if step in (2, 5):
                loss = case.loss(model, draw(case, run, step, 0, dist.get_rank()))
                optimizer.backward(loss * (math.inf if dist.get_rank() == 1 else 1.0))
                with warnings.catch_warnings(action="ignore", category=zerokit.errors.ZerokitWarning):
                    optimizer.step()
                optimizer.zero_grad()
            one_step(model, optimizer, case, run, step, trajectory)
            average.update()
        assert optimizer.skipped_steps == 2
        trajectory.weights = digest(whole_weights(model).items())
        with average.applied():
            trajectory.buffers = digest(whole_weights(model).items())
        assert trajectory.buffers != trajectory.weights
        bits.append([*trajectory.bits(), trajectory.buffers])
    assert all(each == bits[0] for each in bits)


@on_ranks(2, itertools.product(STAGES, ("muon", "soap")))
def test_a_rank_may_own_nothing(given: tuple[int, str]) -> None:
    """One matrix on two ranks: what a class counts in its groups goes on everywhere."""
    stage, mix = given
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False)
    plain = copy.deepcopy(model)
    (cls, groups), *_ = MIXES[mix](plain).items()
    expected = cls(groups)
    optimizer = _make(model, {cls: MIXES[mix](model)[cls]}, stage=stage)
    batch = torch.randn(5, 6)
    for _ in range(5):
        plain.zero_grad()
        plain(batch).square().mean().backward()
        expected.step()
        optimizer.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(whole_weights(model)["weight"], plain.weight.detach(), rtol=0, atol=2e-6)
    assert optimizer.param_groups[0].get("step") == expected.param_groups[0].get("step")


@on_ranks(2, NAMES)
def test_changes_by_hand_and_loads_reach_the_owners(mix: str) -> None:
    """Weights halved between two steps, inside gathered(), and put back by load_state_dict()."""
    bits = []
    for stage in STAGES:
        run = Run(stage=stage, optimizer=mix)
        case, model, optimizer = trained("gpt", run, 2)
        with optimizer.gathered(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        trajectory = Trajectory()
        one_step(model, optimizer, case, run, 2, trajectory)
        moved = {name: value.clone() for name, value in model.state_dict().items()}
        for name, value in model.named_parameters():
            assert not torch.equal(moved[name], kept[name]), (name, value.shape)
        model.load_state_dict(kept)
        one_step(model, optimizer, case, run, 3, trajectory)
        trajectory.weights = digest(whole_weights(model).items())
        bits.append(trajectory.bits())
    assert all(each == bits[0] for each in bits)
