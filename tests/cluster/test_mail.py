"""Messages through torch's store: what is said is heard, whole and in order, and whoever is gone is noticed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launch.ranks import wait_for
from zerokit.cluster import mail
from zerokit.cluster.mail import LEADER, Mail, Peer, host_store, join_store

JSON = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


class Dictionary:
    """A store in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def add(self, key: str, amount: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


@given(
    st.lists(st.tuples(st.sampled_from(["hello", "exit"]), st.dictionaries(st.sampled_from("abc"), JSON))),
    st.integers(1, 40),
)
def test_what_is_said_is_heard_in_order(messages: list[tuple[str, dict[str, object]]], piece: int) -> None:
    """Whatever the pieces; the store is empty then."""
    store = Dictionary()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mail, "_PIECE_BYTES", piece)
        here, there = Peer("1", "leader", 60.0), Peer("leader", "1", 60.0)
        for kind, content in messages:
            here.say(kind, **content)
        here.send(store)  # type: ignore[arg-type]
        there.receive(store)  # type: ignore[arg-type]
    assert [there.hear() for _ in messages] == messages
    assert there.hear() is None
    assert store.values == {}


def test_a_peer_that_says_nothing_is_alive_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two launches a leader may write a report for longer than others would wait for a word."""
    monkeypatch.setattr(mail, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(mail, "SILENCE_SECONDS", 2.0)
    store, port = host_store(0)
    with Mail(store, LEADER, ["1"]) as leader:
        here = leader.peers["1"]
        with Mail(join_store("localhost", port), "1", [LEADER]) as other:
            there = other.peers[LEADER]
            there.say("hello", a="\u00e4" * (5 << 20))
            wait_for(lambda: here.hear() == ("hello", {"a": "\u00e4" * (5 << 20)}))
            begun = time.monotonic()
            while time.monotonic() < begun + 4.0:  # all this time the other one is only alive
                assert here.hear() is None
                assert there.hear() is None
                time.sleep(0.02)
            here.say("end")
            wait_for(lambda: there.hear() == ("end", {}))
        with pytest.raises(EOFError):
            wait_for(lambda: here.hear() is not None)
        wait_for(lambda: here.mute)


def test_the_end_of_the_store_is_the_end_of_everybody() -> None:
    store, port = host_store(0)
    with Mail(store, LEADER, ["1"]) as leader:
        other = Mail(join_store("localhost", port), "1", [LEADER])
        other.peers[LEADER].say("hello")
        wait_for(lambda: leader.peers["1"].hear() is not None)
    del store
    with other, pytest.raises(EOFError):
        wait_for(lambda: other.peers[LEADER].hear() is not None)
    assert other.trouble is not None
