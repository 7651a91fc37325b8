"""`zerokit.LocalSteps` saved in the middle of a round, and continued there or on another mesh."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerokit
from tests.support.distributed import run_ranks
from tests.support.islands import model_of, train_step, weights_of, wrap
from tests.support.on_ranks import on_ranks
from tests.support.training import digest
from zerokit.errors import UsageError


def _continue(
    folder: str, mesh: tuple[int, int], steps: range, save_at: int, kwargs: dict[str, Any], load: bool
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Train over `steps`, saving once; the weights at the end, and sums of what LocalSteps keeps after a load."""
    rank, stage = dist.get_rank(), 3 if load else 2
    model = model_of(seed=rank)
    optimizer = wrap(model, mesh, stage, cls=torch.optim.AdamW, lr=1e-2)
    local = zerokit.LocalSteps(optimizer, **kwargs)
    if load:
        assert zerokit.load(folder, optimizer) == "hello"
    sums = _sums(local)
    for step in steps:
        train_step(model, optimizer, step, rank)
        if step + 1 == save_at:
            path = zerokit.save(folder, optimizer, step=save_at, extra="hello", keep_last=1)
            assert path.name == f"step-{save_at:08d}"
            sums = _sums(local)
    return weights_of(model), sums


def _sums(local: zerokit.LocalSteps) -> dict[str, float]:
    return {
        name: sum(float(shard.double().sum()) for shard in shards.values())
        for name, shards in local.streams().items()
    }


ADAM = functools.partial(torch.optim.Adam, lr=0.05)
STREAMING: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 3, "blend": 0.5}
FIRST_ROUND: dict[str, Any] = {"every": 10, "fragments": 2, "outer": ADAM}
"""After 7 steps one of the fragments has not been synchronised yet."""

RESUMED: list[dict[str, Any]] = [
    {"every": 4},
    {"every": 4, "outer": None, "delay": 2},
    STREAMING | {"wire": "int4"},
    FIRST_ROUND,
]


def _resumed(folder: str, load: bool) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
    steps, save_at = (range(7, 12), 0) if load else (range(12), 7)
    return [
        _continue(f"{folder}/{number}", (2, 2), steps, save_at, kwargs, load)
        for number, kwargs in enumerate(RESUMED)
    ]


def test_resume_in_the_middle_of_a_round_is_bitwise_equal(tmp_path: Path) -> None:
    whole, again = (run_ranks(4, _resumed, str(tmp_path), load) for load in (False, True))
    for before, after in zip(whole, again, strict=True):
        for (weights, sums), (other, other_sums) in zip(before, after, strict=True):
            assert all(torch.equal(value, other[name]) for name, value in weights.items())
            assert sums == other_sums
    assert zerokit.list_steps(tmp_path / "0") == [7]
    for island in range(2):
        zerokit.verify(tmp_path / "0" / f"island-{island}")


def _begun(folder: str) -> None:
    for name, steps, kwargs in (("mean", 7, {"every": 4, "outer": None}), ("adam", 7, FIRST_ROUND)):
        _continue(f"{folder}/{name}", (2, 1), range(steps), steps, kwargs, False)
    _continue(folder, (2, 1), range(5), 5, {"every": 4}, False)


def _gone_on(folder: str) -> None:
    """From a plain mean in the middle of a round, and from a first round of which Adam has half synchronised."""
    for source, fits, kwargs in (
        ("mean", True, {"every": 4, "wire": "int4"}),
        ("adam", True, {"every": 10, "outer": ADAM, "fragments": 3}),
        ("adam", False, {"every": 10}),
        ("adam", False, {"every": 10, "outer": None}),
    ):
        model = model_of(seed=dist.get_rank())
        optimizer = wrap(model, (2, 1), cls=torch.optim.AdamW, lr=1e-2)
        local = zerokit.LocalSteps(optimizer, **kwargs)
        if fits:
            zerokit.load(f"{folder}/{source}", optimizer)
        else:
            with pytest.raises(zerokit.CheckpointError, match="another outer optimizer"):
                zerokit.load(f"{folder}/{source}", optimizer)
            with pytest.warns(UserWarning, match="another outer optimizer"):
                zerokit.load(f"{folder}/{source}", optimizer, strict=False)
        for step in range(7, 12):
            train_step(model, optimizer, step, dist.get_rank())
        local.synchronize()
        digests = [""] * 2
        dist.all_gather_object(digests, digest(weights_of(model).items()))
        assert digests[0] == digests[1], source


def _alone(folder: str) -> None:
    """One island is left: it goes on from that round without the others."""
    optimizer = zerokit.ZeroOptimizer(model_of(), torch.optim.AdamW, bucket_mb=1e-6, precision="fp32")
    with pytest.warns(UserWarning, match="runs of 2 islands"):
        assert zerokit.load(folder, optimizer, strict=False) == "hello"


def test_other_outer_optimizers_wires_and_fragments_go_on_and_an_island_alone(tmp_path: Path) -> None:
    run_ranks(2, _begun, str(tmp_path))
    run_ranks(2, _gone_on, str(tmp_path))
    run_ranks(1, _alone, str(tmp_path))
    with pytest.warns(zerokit.ZerokitWarning, match="island-0"):
        zerokit.consolidate(tmp_path, tmp_path / "model")
    with pytest.raises(zerokit.CheckpointError, match="step-00000005"):
        zerokit.check_run(tmp_path)


def _total(ranks: list[Any], inner: int) -> dict[str, float]:
    """Each island has everything: the sums of one of them."""
    return {name: sum(rank[1][name] for rank in ranks[:inner]) for name in ranks[0][1]}


def test_nothing_is_lost_on_another_mesh(tmp_path: Path) -> None:
    kwargs = STREAMING | {"wire": "int8"}
    saved = _total(run_ranks(4, _continue, str(tmp_path), (2, 2), range(7), 7, kwargs, False), 2)
    assert set(saved) == {"anchor", "momentum_buffer", "known", "lost"}
    for mesh in ((3, 1), (4, 1)):
        world = mesh[0] * mesh[1]
        found = run_ranks(world, _continue, str(tmp_path), mesh, range(7, 7), 0, kwargs, True)
        assert _total(found, mesh[1]) == pytest.approx(saved, rel=1e-12)


@on_ranks(2)
def test_one_ranks_state_without_its_anchor_is_refused() -> None:
    optimizer = wrap(model_of(), (2, 1), cls=torch.optim.AdamW)
    state = optimizer.state_dict()
    zerokit.LocalSteps(optimizer, every=4)
    for call in (optimizer.state_dict, lambda: optimizer.load_state_dict(state)):
        with pytest.raises(UsageError, match=r"zerokit\.save"):
            call()
