"""Waiting is named when it fails, and only then."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import zerokit
from tests.support.recording import Group
from zerokit.runtime.collectives import stalls
from zerokit.runtime.collectives.stalls import StallReporter


class Name:
    """What is waited for, told when somebody asks."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> str:
        self.asked += 1
        return "all-gather of unit 3"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[StallReporter, StallReporter]:
    """Two ranks' watches over one store."""
    store = HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: store)
    monkeypatch.setattr(stalls, "OTHERS_S", 0.0)
    return StallReporter(Group(0, 2)), StallReporter(Group(1, 2))


def test_a_name_is_not_asked_for_while_nothing_fails(ranks: tuple[StallReporter, StallReporter]) -> None:
    one, _ = ranks
    name = Name()
    with one.waiting(name):
        pass
    assert name.asked == 0
    assert one.waited_s > 0


def test_an_error_asks_for_the_name_and_a_silent_rank_is_said_to_be_silent(
    ranks: tuple[StallReporter, StallReporter],
) -> None:
    one, other = ranks
    name = Name()
    with (
        pytest.raises(zerokit.ScheduleError, match=r"its all-gather of unit 3.*\n  rank 1 failed, stopped"),
        one.waiting(name),
    ):
        raise RuntimeError("connection closed")
    assert name.asked == 1
    gave_up = "rank 0 gave up waiting for the all-gather of unit 3"
    with pytest.raises(zerokit.ScheduleError, match=gave_up), other.waiting("broadcast"):
        raise RuntimeError("connection closed")


def test_errors_of_other_kinds_pass(ranks: tuple[StallReporter, StallReporter]) -> None:
    with pytest.raises(KeyError), ranks[0].waiting("broadcast"):
        raise KeyError("mine")
    with pytest.raises(zerokit.ScheduleError, match="mine"), ranks[0].waiting("broadcast"):
        raise RuntimeError("mine")


def test_one_rank_alone_has_nobody_to_ask() -> None:
    alone = StallReporter(Group(0, 1))
    with pytest.raises(zerokit.ScheduleError, match="rank 0 of 1"), alone.waiting("broadcast"):
        raise RuntimeError("closed")
