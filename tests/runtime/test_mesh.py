"""Two axes: the same bits for every pair of stages and every route, checkpoints, nodes, and what is refused."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerokit
from tests.runtime.test_parity import assert_equal_bits, relative
from tests.support.distributed import run_ranks, run_ranks_expecting_errors
from tests.support.machine import bytes_received
from tests.support.models import CASES
from tests.support.on_ranks import on_ranks
from tests.support.streams import LaggingStream, device_way
from tests.support.training import (
    SMALL,
    Run,
    Trajectory,
    mixed,
    one_step,
    require_memory_route,
    train_all,
    trained,
)
from zerokit.checkpoint.reader import Checkpoint
from zerokit.runtime.collectives.host.node import SWITCH

PAIRS = [(outer, inner) for inner in range(4) for outer in range(inner + 1)]
SQUARE = (2, 2)
WIRE = zerokit.Precision(wire=torch.bfloat16)
INT8 = zerokit.Precision(wire="int8")


def _train(name: str, runs: dict[str, Run], switch: str) -> dict[str, Trajectory]:
    os.environ[SWITCH] = switch
    return train_all(name, runs)


@pytest.mark.full(default=["gpt-mesh1-*", "gpt-mesh4-*", "tied_blocks-*"])
@pytest.mark.parametrize(
    ("name", "mesh", "switch", "base", "pairs"),
    [
        ("gpt", SQUARE, "1", Run(clip=math.inf, steps=4), PAIRS),
        ("gpt", SQUARE, "0", Run(clip=0.3, micro=2, steps=3), PAIRS[0::3]),
        ("gpt", (3, 2), "1", Run(clip=0.5, micro=3, accumulate=True, steps=2), PAIRS[1::3]),
        ("lora", (2, 3), "1", Run(precision="bf16", clip=0.5, steps=3), PAIRS[2::3]),
        ("gpt", SQUARE, "1", Run(precision=INT8, clip=0.5, steps=3), [(0, 3), (2, 2), (1, 3)]),
        ("tiny_parameters", SQUARE, "1", Run(precision=WIRE, micro=2, steps=3), PAIRS[0::3]),
        ("unit_unused_on_rank_1", SQUARE, "0", Run(precision="fp16", clip=0.5, steps=3), PAIRS[1::3]),
        ("tied_blocks", SQUARE, "1", Run(optimizer="sgd", micro=2, clip=0.5, steps=3), PAIRS[2::3]),
    ],
)
def test_all_pairs_are_identical_bits(name: str, mesh: Any, switch: str, base: Run, pairs: list[Any]) -> None:
    """All pairs of a plain run; of others a third each, by turns."""
    ways = {str(pair): replace(base, stage=pair, mesh=mesh, bucket_mb=SMALL) for pair in pairs}
    if base.precision != INT8:  # whose blocks follow the units
        ways["by module"] = replace(ways[str(pairs[0])], stage=mixed(name, *PAIRS[-1:2:-2]))
        pairs = [*pairs, "by module"]
    if base == Run(clip=math.inf, steps=4):
        ways["plain"] = base
    ranks = run_ranks(math.prod(mesh), _train, name, ways, switch)
    for rank, results in enumerate(ranks):
        first = results[str(pairs[0])]
        for pair in pairs[1:]:
            assert_equal_bits(results[str(pair)], first, f"rank {rank}, {pair}")
        assert first.weights == ranks[0][str(pairs[0])].weights
        if "plain" in results:
            assert relative(first.losses, results["plain"].losses) <= 1e-6


@on_ranks(4)
def test_a_device_waits_for_both_hops() -> None:
    """The device's way: results are nan until they have been waited for."""
    pairs = [(0, 0), (0, 3), (1, 3), (2, 2), (3, 3)]
    stages = [*pairs, mixed("gpt", (0, 3), (1, 2), (3, 3), (0, 0))]
    runs = {str(stage): Run(stage=stage, mesh=SQUARE, clip=0.3, micro=2, steps=3) for stage in stages}
    with device_way(LaggingStream):
        first, *others = train_all("gpt", runs).values()
    for other in others:
        assert_equal_bits(other, first, "late results")


def _continue(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> list[str]:
    """Steps whose batches are the same on all ranks, so that the number of ranks does not matter to the data."""
    case, losses = CASES["gpt"], []
    for step in range(3):
        loss = case.loss(model, case.batch(0, step, 0))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    return losses


def _save_first(root: Path, run: Run) -> None:
    _, model, optimizer = trained("gpt", run)
    _continue(model, optimizer)
    zerokit.save(root / "first", optimizer, step=3)


def _pass_on(root: Path, source: str, target: str, run: Run) -> list[str]:
    """Load, save again at once, and go on."""
    _, model, optimizer = trained("gpt", run)
    zerokit.load(root / source, optimizer)
    zerokit.save(root / target, optimizer, step=3)
    return _continue(model, optimizer)


def test_a_save_of_a_loaded_state_is_that_of_as_many_ranks_on_one_axis(tmp_path: Path) -> None:
    run_ranks(4, _save_first, tmp_path, Run(stage=2))
    expected = run_ranks(4, _pass_on, tmp_path, "first", "again", Run(stage=3))
    for pair in ((0, 3), (1, 2)):
        target = f"of {pair}"
        assert run_ranks(4, _pass_on, tmp_path, "first", target, Run(stage=pair, mesh=SQUARE)) == expected
        first, second = (tmp_path / name / "step-00000003" for name in ("first", target))
        names = sorted(path.name for path in first.iterdir())
        assert names == sorted(path.name for path in second.iterdir())
        for name in names:
            if name.startswith("rank-") or name == "extra.json":
                assert (first / name).read_bytes() == (second / name).read_bytes(), (pair, name)
        assert Checkpoint(second).manifest.layout == Checkpoint(first).manifest.layout


def _on_nodes(nodes: list[int], stages: Sequence[Any]) -> tuple[str, list[Trajectory], list[tuple[int, int]]]:
    """Bits by the route that nodes take by themselves, and bytes that arrived through sockets in a step."""
    os.environ["GROUP_RANK"] = str(nodes[dist.get_rank()])
    found, bytes_of, route = [], [], ""
    for stage in stages:
        run = Run(stage=stage)
        case, model, optimizer = trained("mlp_784_256_10", run)
        route = optimizer.runtime.collectives.route
        trajectory = Trajectory()
        for step in range(3):
            dist.barrier()
            before = bytes_received()
            one_step(model, optimizer, case, run, step, trajectory)
            with torch.no_grad():
                case.loss(model, case.batch(0, 0, 0))  # stages 1 and 2 gather after the step
            dist.barrier()
            arrived = bytes_received() - before
        numel = sum(unit.numel for unit in optimizer.layout.units)
        bytes_of.append((arrived, numel * 4))
        found.append(trajectory)
    return route, found, bytes_of


@pytest.mark.full(default="nodes0-*")
@pytest.mark.parametrize(
    ("nodes", "route"),
    [
        ([0, 0, 1, 1], "memory and sockets"),
        ([0, 0, 0, 0], "memory"),
        ([0, 1, 2, 3], "sockets"),
        ([0, 1, 1], "sockets"),
        ([0, 1, 0, 1], "sockets"),
    ],
)
def test_nodes_are_the_outer_axis(nodes: list[int], route: str) -> None:
    require_memory_route()
    stages = [0, 1, 2, 3] if route == "memory and sockets" else [0, 3]
    for name, found, bytes_of in run_ranks(len(nodes), _on_nodes, nodes, stages):
        assert name == route
        for other in found[1:]:
            assert other.bits() == found[0].bits()
        if route == "memory and sockets":
            # Half of the unit's half crosses in each direction, not half of the unit for each of two far ranks.
            for arrived, size in bytes_of[1:3]:
                assert 0.9 < arrived / (size / 2) < 1.3


def _freezes(pair: Any, frozen: int) -> None:
    run = Run(stage=pair, mesh=SQUARE)
    case, model, optimizer = trained("gpt", run, 1)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == frozen:
        store.wait(["the others are done"])
        return
    try:
        one_step(model, optimizer, case, run, 1, Trajectory())
    finally:
        if store.add("done", 1) == 3:
            store.set("the others are done", "")


@pytest.mark.full(default="pair0")
@pytest.mark.parametrize("pair", [(0, 3), (1, 3)])
def test_a_rank_that_does_not_come_is_named_on_both_axes(pair: Any) -> None:
    outcomes = run_ranks_expecting_errors(4, _freezes, pair, 3, timeout=20.0)
    for outcome in outcomes[:3]:
        assert outcome.raised("ScheduleError"), outcome.describe()
        assert "rank 3 " in outcome.error


@on_ranks(4)
def test_what_does_not_fit_is_said_at_construction() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"mesh": (3, 2)}, "mesh=(3, 2): 6 ranks, but the process group has 4"),
        ({"mesh": (1, 4), "stage": (3, 1)}, "write stage=(1, 3)"),
        ({"mesh": (4, 1), "stage": (0, 4)}, "stage 4 is unknown"),
        ({"mesh": "2x2"}, "expected (outer, inner)"),
        ({"mesh": (2, 2, 1)}, "expected (outer, inner)"),
        ({"mesh": (2, 2.0)}, "expected (outer, inner)"),
        ({"mesh": SQUARE, "stage": (3, 1)}, "write stage=(1, 3)"),
        ({"stage": (1, 3)}, "names two axes, but the mesh has one"),
        (
            {"mesh": DeviceMesh("cpu", [[0, 2], [1, 3]]), "stage": (0, 3)},
            "its ranks in order are not those of the process group",
        ),
        # A replica with another learning rate is named.
        (
            {"mesh": SQUARE, "stage": (0, 3), "lr": 0.2 if dist.get_rank() == 2 else 0.1},
            "rank 2: lr is 0.2, not 0.1",
        ),
    ]
    for options, text in cases:
        with pytest.raises(zerokit.ZerokitError, match=re.escape(text)):
            zerokit.ZeroOptimizer(nn.Linear(4, 4), torch.optim.SGD, **({"lr": 0.1} | options))


@on_ranks(4)
def test_a_mesh_or_a_device_mesh_says_the_shape() -> None:
    two = init_device_mesh("cpu", SQUARE, mesh_dim_names=("replicate", "shard"))
    cases: list[Any] = [(SQUARE, (1, 3)), (two, (0, 3)), (init_device_mesh("cpu", (4,)), 3)]
    for mesh, stage in cases:
        optimizer = zerokit.ZeroOptimizer(nn.Linear(4, 4), torch.optim.SGD, lr=0.1, mesh=mesh, stage=stage)
        assert optimizer.stage == stage
    assert "ZeroOptimizer(stage=3, world=4" in repr(optimizer)


@pytest.mark.parametrize(
    ("mesh", "pair", "stage"), [((1, 2), (0, 3), 3), ((2, 1), (0, 3), 0), ((2, 1), (2, 3), 2), ((1, 2), 3, 3)]
)
def test_an_axis_of_one_rank_leaves_the_other_one(mesh: Any, pair: Any, stage: Any) -> None:
    """As a script for several nodes has it on one, or on nodes of one rank."""
    runs = {"lone": Run(stage=pair, mesh=mesh, clip=0.3, steps=2), "one": Run(stage=stage, clip=0.3, steps=2)}
    for results in run_ranks(2, _train, "gpt", runs, "1"):
        assert_equal_bits(results["lone"], results["one"], "the axis that is left")


@on_ranks(2)
def test_an_axis_of_one_rank_is_not_shown() -> None:
    for mesh, stage in (((1, 2), 3), ((2, 1), 1)):
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
        optimizer = zerokit.ZeroOptimizer(
            nn.Linear(4, 4), torch.optim.SGD, lr=0.1, mesh=device_mesh, stage=(1, 3)
        )
        assert optimizer.stage == stage
