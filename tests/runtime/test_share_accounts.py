"""`memory()` and `traffic()` of ranks with unequal shares: equal to predictions, and in proportion to the shares."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerokit
from tests.runtime.test_accounts import PAIRS, STAGES
from tests.support.distributed import run_alone, run_ranks
from tests.support.training import LARGE, Run, trained
from zerokit.formulas import MemoryReport, TrafficReport

Shares = tuple[int, ...]

CASES: list[tuple[str, Run, dict[str, Any]]] = [
    ("gpt", Run(), {}),
    ("lora", Run(precision="bf16"), {}),
    ("odd_shapes", Run(optimizer="muon"), {}),
    ("odd_shapes", Run(optimizer="muon", precision="bf16", bucket_mb=LARGE), {}),
    ("gpt", Run(bucket_mb=LARGE, micro=2), {"states": "fp8"}),
    ("gpt", Run(precision=zerokit.Precision(wire="int8")), {}),
]
"""Models, how they are trained, and options beside."""
REAL: list[Shares] = [(1, 1), (3, 1), (2, 1, 1), (5, 3, 2, 0)]


def _generated(count: int) -> list[Shares]:
    draw = random.Random(55)
    found = [
        tuple(draw.choice((0, 1, 1, 2, 3, 7, 100)) for _ in range(draw.randint(2, 9)))
        for _ in range(2 * count)
    ]
    return [shares for shares in found if any(shares)][:count]


Account = tuple[MemoryReport, MemoryReport, TrafficReport, TrafficReport]


def _account(name: str, run: Run, options: dict[str, Any]) -> Account:
    case, model, optimizer = trained(name, run, 2, **options)
    moved = optimizer.traffic()
    expected = optimizer.predicted_traffic(micro_batches=run.micro, reductions=run.micro)
    optimizer.backward(case.loss(model, case.batch(0, 9, dist.get_rank())))
    return optimizer.memory(), optimizer.predicted_memory(), moved, expected


def _require_equal(account: Account, what: object) -> None:
    held, predicted, moved, expected = account
    assert held == predicted, what
    assert moved.by_operation == expected.by_operation, what


def _accounts(shares: Shares, mesh: tuple[int, int] | None) -> list[tuple[object, Account]]:
    return [
        (
            (name, run, stage),
            _account(name, replace(run, stage=stage, mesh=mesh), options | {"shares": shares}),
        )
        for name, run, options in CASES
        for stage in (PAIRS if mesh else STAGES)
    ]


@pytest.mark.full(default="shares[01]-*")
@pytest.mark.parametrize(
    ("shares", "mesh"), [*((each, None) for each in REAL), ((3, 1), (2, 2)), ((5, 3, 2, 0), (2, 2))]
)
def test_memory_and_traffic_equal_predictions(shares: Shares, mesh: tuple[int, int] | None) -> None:
    ranks = run_ranks(4 if mesh else len(shares), _accounts, shares, mesh)
    for together in zip(*ranks, strict=True):
        for what, account in together:
            _require_equal(account, what)
        # What all ranks receive, padding included, is at least the payload that all of them move.
        moved = [account[2] for _, account in together]
        assert sum(one.received_bytes for one in moved) >= moved[0].bytes, together[0][0]


def _faked(generated: list[Shares]) -> None:
    for number, shares in enumerate(generated):
        world = len(shares)
        for rank in {0, world - 1, number % world}:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            meshes = [None, (2, world // 2)] if world % 2 == 0 else [None]
            for mesh in meshes:
                stages = PAIRS if mesh else STAGES
                stage = stages[(number + rank) % len(stages)]
                for name, run, options in CASES:
                    given = options | {"shares": shares, "on_nonfinite": "ignore"}
                    _require_equal(
                        _account(name, replace(run, stage=stage, mesh=mesh), given),
                        (shares, rank, stage, mesh),
                    )
            dist.destroy_process_group()


def test_generated_shares_of_a_fake_process_group() -> None:
    run_alone(_faked, _generated(20))


def _proportions() -> list[int]:
    return [trained("gpt", Run(stage=3, bucket_mb=LARGE), 1, shares=(5, 3, 2, 0))[2].memory().optimizer]


def test_a_rank_holds_its_share() -> None:
    held = [each[0] for each in run_ranks(4, _proportions)]
    assert held[3] == 0
    for own, share in zip(held, (5, 3, 2, 0), strict=True):
        assert own == pytest.approx(sum(held) * share / 10, abs=2 * 64 * 3 * 12)
