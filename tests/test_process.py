"""A process is told from all others, and from a later one that was given its number."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from zerokit import process
from zerokit.process import Process


def test_this_one_lives_and_says_so_in_text() -> None:
    here = Process.current()
    assert here.lives()
    assert Process.parse(str(here)) == here
    assert "/" not in str(here)


@pytest.mark.parametrize(
    ("change", "lives"),
    [
        ({"start": 1}, False),
        ({"pid": 2**22 + 1}, False),
        ({"pid": 10**19}, False),
        ({"host": "elsewhere"}, None),
        ({"machine": "00000000"}, None),
        ({"boot": "00000000"}, None),
        ({"space": 1}, None),
    ],
)
def test_others_are_gone_or_not_seen(change: dict[str, object], lives: bool | None) -> None:
    assert replace(Process.current(), **change).lives() is lives  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "a.b", "../host.00000000.00000000.1.1.1", "host.00000000.0000000g.1.1.1"]
)
def test_other_text_is_no_process(text: str) -> None:
    assert Process.parse(text) is None


@pytest.mark.parametrize(
    ("answer", "lives"), [(None, None), (PermissionError, None), (ProcessLookupError, False)]
)
def test_a_process_that_cannot_be_seen_is_not_gone(
    monkeypatch: pytest.MonkeyPatch, answer: type[OSError] | None, lives: bool | None
) -> None:
    """Another user's, where /proc is mounted with hidepid."""

    def ask(pid: int, number: int) -> None:
        assert number == 0
        if answer is not None:
            raise answer

    here = Process.current()
    monkeypatch.setattr(process, "_seen", lambda pid: None)
    monkeypatch.setattr(os, "kill", ask)
    assert replace(Process.current(), start=here.start).lives() is lives
