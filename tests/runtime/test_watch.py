"""Waiting is named when it lasts or fails, and only then."""

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
    """Two ranks' watches over one store; no thread publishes for them."""
    store = HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: store)
    monkeypatch.setattr(stalls, "_publish_long_waits", lambda wake, reference: None)
    return StallReporter(Group(0, 2)), StallReporter(Group(1, 2))


def test_a_name_is_not_asked_for_while_nobody_waits_long(ranks: tuple[StallReporter, StallReporter]) -> None:
    one, _ = ranks
    name = Name()
    with one.waiting(name):
        one.publish_if_long()
    one.publish_if_long()
    assert name.asked == 0
    assert one.waited_s > 0


def test_a_long_wait_is_published_by_name_and_an_error_tells_of_it(
    ranks: tuple[StallReporter, StallReporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ranks
    monkeypatch.setattr(stalls, "PUBLISH_AFTER_S", 0.0)
    name = Name()
    with other.waiting(name):
        other.publish_if_long()
        assert name.asked == 1
        with (
            pytest.raises(zerokit.ScheduleError) as caught,
            one.waiting("reduce-scatter of unit 1"),
        ):
            raise RuntimeError("timed out")
    text = str(caught.value)
    assert text.startswith("rank 0 of 2 did not get through its reduce-scatter of unit 1 (wait 1): timed out")
    assert "rank 1 waits for the all-gather of unit 3 (wait 1)" in text


def test_an_error_asks_for_the_name_and_a_silent_rank_is_said_to_be_silent(
    ranks: tuple[StallReporter, StallReporter],
) -> None:
    one, other = ranks
    name = Name()
    with (
        pytest.raises(
            zerokit.ScheduleError, match=r"its all-gather of unit 3.*\n  rank 1 is not known to wait"
        ),
        one.waiting(name),
    ):
        raise RuntimeError("connection closed")
    assert name.asked >= 1
    gave_up = "rank 0 gave up waiting for the all-gather of unit 3"
    with pytest.raises(zerokit.ScheduleError, match=gave_up), other.waiting("broadcast"):
        raise RuntimeError("connection closed")


def test_publishing_goes_on_after_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    class Moody(HashStore):
        errors = 2

        def set(self, key: str, value: str) -> None:
            if self.errors:
                self.errors -= 1
                raise RuntimeError("connection reset")
            super().set(key, value)

    store = Moody()
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: store)
    monkeypatch.setattr(stalls, "PUBLISH_AFTER_S", 0.01)
    one = StallReporter(Group(0, 2))
    with one.waiting("all-gather of unit 3"):
        assert store.get(f"{one._prefix}/0").decode() == "waits for the all-gather of unit 3 (wait 1)"


def test_errors_of_other_kinds_pass(ranks: tuple[StallReporter, StallReporter]) -> None:
    with pytest.raises(KeyError), ranks[0].waiting("broadcast"):
        raise KeyError("mine")
    with pytest.raises(zerokit.ScheduleError, match="mine"), ranks[0].waiting("broadcast"):
        raise RuntimeError("mine")


def test_one_rank_alone_has_nobody_to_ask() -> None:
    alone = StallReporter(Group(0, 1))
    with pytest.raises(zerokit.ScheduleError, match="rank 0 of 1"), alone.waiting("broadcast"):
        raise RuntimeError("closed")
