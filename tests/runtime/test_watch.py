"""Waiting is named when it fails, and only then."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import zerokit
from tests.support.recording import Group
from zerokit.runtime.collectives import stalls
from zerokit.runtime.collectives.stalls import StallReporter


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[StallReporter, StallReporter]:
    """Two ranks' watches over one store."""
    store = HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: store)
    monkeypatch.setattr(stalls, "OTHERS_S", 0.0)
    return StallReporter(Group(0, 2)), StallReporter(Group(1, 2))


def test_a_name_is_asked_for_when_something_fails_and_a_silent_rank_is_said_to_be_silent(
    ranks: tuple[StallReporter, StallReporter],
) -> None:
    one, other = ranks
    name = Mock(return_value="all-gather of unit 3")
    with one.waiting(name):
        pass
    assert name.call_count == 0
    assert one.waited_s > 0
    said = r"its all-gather of unit 3.*\n  rank 1 failed, stopped"
    with pytest.raises(zerokit.ScheduleError, match=said), one.waiting(name):
        raise RuntimeError("connection closed")
    assert name.call_count == 1
    gave_up = "rank 0 gave up waiting for the all-gather of unit 3"
    with pytest.raises(zerokit.ScheduleError, match=gave_up), other.waiting("broadcast"):
        raise RuntimeError("connection closed")


def test_errors_of_other_kinds_pass_and_one_rank_alone_has_nobody_to_ask(
    ranks: tuple[StallReporter, StallReporter],
) -> None:
    with pytest.raises(KeyError), ranks[0].waiting("broadcast"):
        raise KeyError("mine")
    with pytest.raises(zerokit.ScheduleError, match="mine"), ranks[0].waiting("broadcast"):
        raise RuntimeError("mine")
    alone = StallReporter(Group(0, 1))
    with pytest.raises(zerokit.ScheduleError, match="rank 0 of 1"), alone.waiting("broadcast"):
        raise RuntimeError("closed")
