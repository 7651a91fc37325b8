"""The ranks' launcher itself: what it hands back when ranks return, raise, die or hang."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings

import pytest
import torch.distributed as dist

from tests.support import distributed
from tests.support.distributed import RanksFailed, run_alone, run_ranks, run_ranks_expecting_errors


def _warn_on(rank: int) -> str:
    if dist.get_rank() == rank:
        warnings.warn("the seventh parameter", UserWarning, stacklevel=1)
    return "fine"


def test_a_failing_rank_is_reported_with_its_traceback_and_warnings_are_errors() -> None:
    with pytest.raises(RanksFailed, match=r"ranks \[1\] of 3 failed") as failure:
        run_ranks(3, _warn_on, 1)
    assert "_warn_on" in str(failure.value)
    assert "the seventh parameter" in str(failure.value)
    outcomes = failure.value.outcomes
    assert [outcome.value for outcome in outcomes] == ["fine", None, "fine"]
    assert outcomes[1].raised("Warning")
    assert not outcomes[1].raised("ValueError")


def _one_rank_is_silent() -> None:
    if dist.get_rank() == 0:
        raise RuntimeError("rank 0 stops here")
    dist.barrier()


def test_a_rank_that_fails_keeps_its_connections_so_that_others_run_into_their_time_out() -> None:
    first, second = run_ranks_expecting_errors(2, _one_rank_is_silent, timeout=1.0)
    assert first.error == "rank 0 stops here"
    assert second.raised("RuntimeError")


def _die_on(rank: int) -> str:
    print("about to end", file=sys.stderr)
    # Joining ends on each rank by itself: who dies at once may die before a peer has connected.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"joined by {dist.get_rank()}", "")
    store.wait([f"joined by {peer}" for peer in range(dist.get_world_size())])
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def test_a_killed_rank_is_reported_with_its_signal_and_output() -> None:
    first, second = run_ranks_expecting_errors(2, _die_on, 1)
    assert first.ok
    assert first.value == "fine"
    assert second.exitcode == -signal.SIGKILL
    assert "about to end" in second.log


def _sleep_forever_in_a_named_function() -> None:
    time.sleep(3600)


def test_past_the_deadline_ranks_print_their_stacks_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "DEADLINE", 2.0)
    with pytest.raises(RanksFailed, match="_sleep_forever_in_a_named_function"):
        run_alone(_sleep_forever_in_a_named_function)
