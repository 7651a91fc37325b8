"""`zerokit.LocalSteps` misused, among islands that disagree, and after ranks are lost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerokit
from tests.support.distributed import AT_ONCE, run_ranks_expecting_errors
from tests.support.islands import SGD, model_of, train_step, wrap
from tests.support.on_ranks import on_ranks
from zerokit.errors import UsageError


@on_ranks(2)
def test_misuse_is_refused_at_construction() -> None:
    def refused(words: str, call: Callable[[], object]) -> None:
        with pytest.raises(UsageError, match=re.escape(words)):
            call()

    LocalSteps: Any = zerokit.LocalSteps

    def build(stage: Any, mesh: Any) -> zerokit.ZeroOptimizer:
        return zerokit.ZeroOptimizer(model_of(), SGD, stage=stage, mesh=mesh, bucket_mb=1e-6, lr=0.1)

    refused("(islands, ranks of an island)", lambda: build(("local", 2), None))
    refused("one island has nothing to synchronise with", lambda: build(("local", 2), (1, 2)))
    refused("3 ranks, but the process group has 2", lambda: build(("local", 2), (3, 1)))
    refused("stage 4 is unknown", lambda: build(("local", 4), (2, 1)))
    refused("stage 4 is unknown", lambda: build({"*": ("local", 4)}, (2, 1)))
    refused("for all modules or for none", lambda: build({"0": 2, "*": ("local", 2)}, (2, 1)))
    refused("'0.2' is no module", lambda: build({"0.2": ("local", 3), "*": ("local", 2)}, (2, 1)))
    refused("stage 'local' is unknown", lambda: build((2, "local"), None))
    refused('stage=("local", stage)', lambda: LocalSteps(build(2, None), every=2))
    optimizer = build(("local", 2), (2, 1))
    refused("LocalSteps", lambda: train_step(model_of(), optimizer, 0, 0))
    refused("at least 1", lambda: LocalSteps(optimizer, every=0))
    refused("the model has 4 units", lambda: LocalSteps(optimizer, every=9, fragments=9))
    refused("pass at most 2", lambda: LocalSteps(optimizer, every=2, fragments=3))
    refused("from 0 to 1", lambda: LocalSteps(optimizer, every=2, delay=2))
    refused("at most 1", lambda: LocalSteps(optimizer, every=2, blend=0.0))
    refused("'int8' or 'int4'", lambda: LocalSteps(optimizer, every=2, wire="bf16"))
    refused("functools.partial", lambda: LocalSteps(optimizer, every=2, outer="sgd"))
    refused("pass the ZeroOptimizer", lambda: LocalSteps(model_of(), every=2))
    with pytest.raises(zerokit.UnsupportedOptimizer):
        LocalSteps(optimizer, every=2, outer=torch.optim.LBFGS)
    LocalSteps(optimizer, every=2)
    refused("use optimizer.local_steps", lambda: LocalSteps(optimizer, every=2))


def _apart() -> None:
    with pytest.raises(zerokit.LayoutMismatch, match="every is"):
        zerokit.LocalSteps(wrap(model_of(), (2, 1)), every=2 + dist.get_rank())
    model = model_of()
    local = zerokit.LocalSteps(optimizer := wrap(model, (2, 1)), every=2)
    for step in range(4 if dist.get_rank() else 3):
        train_step(model, optimizer, step, 0)
    local.synchronize()


def test_islands_that_disagree_or_come_to_other_synchronisations_are_named() -> None:
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


@pytest.mark.parametrize(
    ("lost", "kwargs"),
    [([2, 3], {"every": 6}), ([2, 3], {"every": 6, "fragments": 2, "delay": 3}), ([3], {"every": 6})],
)
def test_a_killed_island_or_rank_is_named_and_nothing_is_half_applied(
    lost: list[int], kwargs: dict[str, Any]
) -> None:
    *first, outcome, _ = run_ranks_expecting_errors(4, _lose, lost, kwargs, timeout=10.0)
    for other in first:
        assert other.raised("ScheduleError"), other.describe()
    if lost == [3]:
        # Rank 2 waits for it inside their island; who else is first to wait in vain depends on the load.
        assert outcome.raised("ScheduleError"), outcome.describe()
        assert "rank 1" in outcome.error
    else:
        assert all("island 1" in other.error or "another rank of island 0" in other.error for other in first)
