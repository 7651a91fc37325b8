"""The ranks' launcher itself: what it hands back when ranks return, raise, die or hang."""

from __future__ import annotations

import time
import warnings

import pytest
import torch.distributed as dist

from tests.support import distributed
from tests.support.distributed import RanksFailed, run_alone, run_ranks


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


def _sleep_forever_in_a_named_function() -> None:
    time.sleep(3600)


def test_past_the_deadline_ranks_print_their_stacks_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "DEADLINE", 2.0)
    with pytest.raises(RanksFailed, match="_sleep_forever_in_a_named_function"):
        run_alone(_sleep_forever_in_a_named_function)
