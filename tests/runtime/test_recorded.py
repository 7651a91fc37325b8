"""Bits, memory, traffic and files are those of recorded.json; `python -m tests.runtime.recorded` compares more."""

from __future__ import annotations

import functools
import json

import pytest

from tests.runtime.recorded import FILE, MACHINE, WORLDS, differences, fingerprint, record, scenes

#: One in so many: each world, model, loop and stage is among them.
STRIDE = 5

_fingerprint = functools.cache(fingerprint)


@pytest.mark.full(default="3")
@pytest.mark.parametrize("world", WORLDS)
def test_results_are_the_recorded_ones(world: str) -> None:
    recorded = json.loads(FILE.read_text())
    found = record(world, list(scenes(world))[::STRIDE])
    assert not differences(found, recorded, same_machine=_fingerprint() == recorded[MACHINE])
