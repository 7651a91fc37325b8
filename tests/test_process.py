"""A process is told from all others, and from a later one that was given its number."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
