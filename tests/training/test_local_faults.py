"""`zerokit.LocalSteps` misused, among islands that disagree, and after ranks are lost."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerokit
from tests.support.distributed import AT_ONCE, run_ranks, run_ranks_expecting_errors
from tests.support.islands import SGD, model_of, train_step, wrap
from zerokit.errors import UsageError


def _misuse() -> dict[str, str]:
    found: dict[str, str] = {}

    def refused(name: str, call: Any) -> None:
        with pytest.raises(UsageError) as caught:
            call()
        found[name] = str(caught.value)

    def build(stage: Any, mesh: Any) -> zerokit.ZeroOptimizer:
        return zerokit.ZeroOptimizer(model_of(), SGD, stage=stage, mesh=mesh, bucket_mb=1e-6, lr=0.1)

    refused("no mesh", lambda: build(("local", 2), None))
    refused("one island", lambda: build(("local", 2), (1, 2)))
    refused("too many", lambda: build(("local", 2), (3, 1)))
    refused("inner stage", lambda: build(("local", 4), (2, 1)))
    refused("inner local", lambda: build((2, "local"), None))
    refused("no islands", lambda: zerokit.LocalSteps(build(2, None), every=2))
    optimizer = build(("local", 2), (2, 1))
    refused("no local steps", lambda: train_step(model_of(), optimizer, 0, 0))
    refused("every", lambda: zerokit.LocalSteps(optimizer, every=0))
    refused("fragments", lambda: zerokit.LocalSteps(optimizer, every=9, fragments=9))
    refused("turns", lambda: zerokit.LocalSteps(optimizer, every=2, fragments=3))
    refused("delay", lambda: zerokit.LocalSteps(optimizer, every=2, delay=2))
    refused("blend", lambda: zerokit.LocalSteps(optimizer, every=2, blend=0.0))
    refused("wire", lambda: zerokit.LocalSteps(optimizer, every=2, wire="bf16"))  # type: ignore[arg-type]
    refused("outer", lambda: zerokit.LocalSteps(optimizer, every=2, outer="sgd"))  # type: ignore[arg-type]
    refused("model", lambda: zerokit.LocalSteps(model_of(), every=2))  # type: ignore[arg-type]
    with pytest.raises(zerokit.UnsupportedOptimizer):
        zerokit.LocalSteps(optimizer, every=2, outer=torch.optim.LBFGS)
    zerokit.LocalSteps(optimizer, every=2)
    refused("twice", lambda: zerokit.LocalSteps(optimizer, every=2))
    return found


def test_misuse_is_refused_at_construction() -> None:
    for errors in run_ranks(2, _misuse):
        for name, expected in {
            "no mesh": "(islands, ranks of an island)",
            "one island": "one island has nothing to synchronise with",
            "too many": "3 ranks, but the process group has 2",
            "inner stage": "stage 4 is unknown",
            "inner local": "stage 'local' is unknown",
            "no islands": 'stage=("local", stage)',
            "every": "at least 1",
            "fragments": "the model has 4 units",
            "turns": "pass at most 2",
            "delay": "from 0 to 1",
            "blend": "at most 1",
            "outer": "functools.partial",
            "wire": "'int8' or 'int4'",
            "model": "pass the ZeroOptimizer",
            "twice": "use optimizer.local_steps",
        }.items():
            assert expected in errors[name], errors[name]


def _disagree() -> None:
    optimizer = wrap(model_of(), (2, 1))
    zerokit.LocalSteps(optimizer, every=2 + dist.get_rank())


def test_islands_that_disagree_are_named() -> None:
    for outcome in run_ranks_expecting_errors(2, _disagree):
        assert outcome.raised("LayoutMismatch")
        assert "every is" in outcome.error


def _apart() -> None:
    model = model_of()
    local = zerokit.LocalSteps(optimizer := wrap(model, (2, 1)), every=2)
    for step in range(4 if dist.get_rank() else 3):
        train_step(model, optimizer, step, 0)
    local.synchronize()


def test_islands_that_come_to_other_synchronisations_are_named() -> None:
    for rank, outcome in enumerate(run_ranks_expecting_errors(2, _apart, **AT_ONCE)):
        assert outcome.raised("ScheduleError"), outcome.describe()
        assert f"island {1 - rank} (rank {1 - rank}) came last to the synchronisation" in outcome.error


def _lose(lost: list[int], kwargs: dict[str, Any]) -> None:
    rank = dist.get_rank()
    model = model_of()
    optimizer = wrap(model, (2, 2), stage=2)
    zerokit.LocalSteps(optimizer, **kwargs)
    before = {}
    try:
        for step in range(8):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            if step == 5 and rank in lost:
                os.kill(os.getpid(), signal.SIGKILL)
            train_step(model, optimizer, step, rank)
    except zerokit.ScheduleError:
        # The step was made, and nothing of the synchronisation was taken over.
        masters = torch.cat([p.detach().flatten() for p in model.parameters()])
        moved = torch.cat([value.flatten() for value in before.values()]) - masters
        assert moved.abs().max() < 0.1
        raise


@pytest.mark.parametrize("kwargs", [{"every": 6}, {"every": 6, "fragments": 2, "delay": 3}])
def test_a_killed_island_is_named_and_nothing_is_half_applied(kwargs: dict[str, Any]) -> None:
    outcomes = run_ranks_expecting_errors(4, _lose, [2, 3], kwargs, timeout=5.0)
    for outcome in outcomes[:2]:
        assert outcome.raised("ScheduleError"), outcome.describe()
        assert "island 1" in outcome.error or "another rank of island 0" in outcome.error


def test_a_killed_rank_is_named() -> None:
    outcomes = run_ranks_expecting_errors(4, _lose, [3], {"every": 6}, timeout=5.0)
    for rank in (0, 1, 2):
        assert outcomes[rank].raised("ScheduleError"), outcomes[rank].describe()
    # Rank 2 waits for it inside their island; who else is first to wait in vain depends on the load.
    assert "rank 1" in outcomes[2].error
