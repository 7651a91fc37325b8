"""Ranks with unequal shares: the bits of equal ones, memory in proportion, and shares that do not fit refused."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import zerokit
from tests.runtime.test_parity import assert_equal_bits
from tests.support.devices import PRECISIONS, SCENES, WIRE, at, lagging, prompt, train
from tests.support.distributed import run_ranks
from tests.support.on_ranks import on_ranks
from tests.support.training import SMALL, Run, Trajectory, train_zero, trained
from zerokit.layout import align
from zerokit.runtime.collectives.host.node import SWITCH

SHARES: dict[int, list[tuple[int, ...]]] = {
    2: [(3, 1), (0, 1), (1, 7)],
    3: [(2, 1, 1), (1, 0, 3), (0, 0, 1)],
    4: [(5, 3, 2, 0), (100, 1, 1, 100)],
}
MODELS = ("odd_shapes", "gpt", "tied_inside", "tiny_parameters", "unit_unused_on_one_rank", "lora", "resnet")
RUNS: dict[str, tuple[Run, dict[str, Any]]] = {
    "fp32": (Run(clip=0.3, steps=4), {}),
    "bf16, several passes": (Run(clip=0.3, precision="bf16", micro=2, steps=3), {}),
    "fp16, accumulated": (Run(precision="fp16", micro=2, accumulate=True, steps=3), {}),
    "a bf16 wire": (Run(precision=WIRE, steps=3), {}),
    "muon": (Run(optimizer="muon", steps=3), {}),
    "adafactor": (Run(optimizer="adafactor", steps=3), {}),
    "fp8": (Run(precision="bf16", steps=3), {"states": "fp8"}),
    "disk": (Run(steps=3), {"states": "."}),
}


def _ways(world: int, switch: str) -> dict[str, tuple[Trajectory, Trajectory]]:
    """Every kind of run with every shares, stages and models by turns, and the same with equal ones."""
    os.environ[SWITCH] = switch
    found = {}
    for turn, (name, (run, options)) in enumerate(RUNS.items()):
        for number, shares in enumerate(SHARES[world]):
            stage = (turn + number + world) % 4
            model = MODELS[(turn + 2 * number) % len(MODELS)] if name != "disk" else "odd_shapes"
            own = replace(run, stage=stage)
            label = f"{name}, {model}, stage {stage}, {shares}"
            found[label] = (
                train_zero(model, own, shares=shares, **options),
                train_zero(model, own, **options),
            )
    return found


@pytest.mark.full(default="2-1")
@pytest.mark.parametrize("switch", ["1", "0"])
@pytest.mark.parametrize("world", SHARES)
def test_shares_change_no_bit(world: int, switch: str) -> None:
    for rank, found in enumerate(run_ranks(world, _ways, world, switch)):
        for label, (unequal, equal) in found.items():
            assert_equal_bits(unequal, equal, f"rank {rank}, {label}")


@on_ranks(
    4, [((0, 3), (3, 1)), ((1, 3), (1, 2)), ((2, 2), (0, 5)), ((3, 3), (3, 1, 2, 1)), ((1, 2), (1, 0, 4, 3))]
)
def test_shares_change_no_bit_on_two_axes(given: tuple[tuple[int, int], tuple[int, ...]]) -> None:
    """Those of the inner axis, or of every rank."""
    stage, shares = given
    for model, run in (("gpt", Run(clip=0.3, steps=3)), ("odd_shapes", Run(optimizer="muon", steps=3))):
        run = replace(run, stage=stage, mesh=(2, 2))
        assert_equal_bits(train_zero(model, run, shares=shares), train_zero(model, run), str(given))


@on_ranks(3, [(name, way) for name in ("plain", "frozen", "whole tensors") for way in (*PRECISIONS, WIRE)])
def test_shares_on_the_devices_way_change_no_bit_when_results_are_late(given: tuple[str, Any]) -> None:
    """NCCL's sends and receives in a group, over gloo. Sums of two terms are the same in any order, those of three not:
    the device's equal sums are gloo's own there, so unequal ones are compared with each other."""
    name, way = given
    scene = at(SCENES[name], precision=way, stage=3 if name != "frozen" else 2)
    with prompt("cpu") as device:
        expected = train(scene, device, shares=(2, 1, 1))
        assert train(at(scene, stage=0), device, shares=(1, 0, 3)) == expected
    with lagging("cpu"):
        assert train(scene, device, shares=(2, 1, 1)) == expected


@on_ranks(3)
def test_a_rank_holds_its_share() -> None:
    """Each unit's piece is within one alignment of its part, and what a rank of share 0 holds is nothing."""
    rank = dist.get_rank()
    for shares in ((2, 1, 1), (1, 0, 3)):
        _, _, zero = trained("gpt", Run(stage=3, bucket_mb=SMALL), steps=1, shares=shares)
        for unit in zero.layout.units:
            wanted = sum(align(p.numel) for p in unit.parameters) * shares[rank] / sum(shares)
            assert abs(unit.shard(rank).numel - wanted) < 64
        memory = zero.memory()
        assert (memory.optimizer == 0) == (shares[rank] == 0)
        assert zero.layout.shares == shares


@on_ranks(2)
def test_equal_shares_are_no_shares() -> None:
    for shares in ((1, 1), (7, 7), None):
        _, _, zero = trained("odd_shapes", Run(), shares=shares)
        assert zero.layout.shares == ()


@on_ranks(2)
def test_shares_by_memory_are_agreed_and_printed() -> None:
    _, _, zero = trained("odd_shapes", Run(), shares="memory")
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, zero.layout.shares)
    assert everyone[0] == everyone[1]


REFUSED: list[tuple[Any, str]] = [
    ((1, 2, 3), "3 shares, expected one for each of 2 ranks"),
    ((0, 0), "not all of them 0"),
    ((-1, 2), "expected integers from 0"),
    ((1.5, 2), "expected integers from 0"),
    ("free", "expected one integer for each of 2 ranks"),
    (3, "expected one integer for each of 2 ranks"),
]


@on_ranks(2, REFUSED)
def test_shares_that_do_not_fit_are_refused(given: tuple[Any, str]) -> None:
    shares, text = given
    with pytest.raises(zerokit.UsageError, match=text):
        trained("odd_shapes", Run(), shares=shares)


@on_ranks(2)
def test_ranks_with_other_shares_are_told() -> None:
    with pytest.raises(zerokit.LayoutMismatch, match="shares"):
        trained("odd_shapes", Run(), shares=(3, 1) if dist.get_rank() else (1, 3))


@on_ranks(2)
def test_shares_of_islands_are_refused() -> None:
    with pytest.raises(zerokit.UsageError, match="does not go with islands"):
        trained("odd_shapes", Run(stage=("local", 1), mesh=(2, 1)), shares=(3, 1))


@on_ranks(2)
def test_shares_by_memory_follow_what_is_free() -> None:
    free = {0: 10 << 30, 1: 5 << 30}[dist.get_rank()]
    with patch("zerokit.runtime.shares.free_bytes", lambda device, sharing: free):
        _, _, zero = trained("odd_shapes", Run(stage=3), steps=1, shares="memory")
    assert zero.layout.shares == (2, 1)


@on_ranks(3)
def test_ranks_of_one_host_divide_what_is_free_there() -> None:
    """Two ranks on a host, and one on another with as much memory; then all on one, two in groups of their own."""
    rank = dist.get_rank()
    hosts = [{"a": 8 << 30}, {"a": 8 << 30}, {"b": 8 << 30}][rank]
    groups = [{"a": 9 << 30, "x": 1 << 30}, {"a": 9 << 30, "y": 2 << 30}, {"a": 9 << 30}][rank]
    for pools, shares in ((hosts, (1, 1, 2)), (groups, (1, 2, 3))):
        with patch("zerokit.runtime.shares.memory_pools", lambda pools=pools: pools):
            _, _, zero = trained("odd_shapes", Run(stage=3), steps=1, shares="memory")
        assert zero.layout.shares == shares
