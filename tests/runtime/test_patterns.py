"""Every pattern is, at every stage, what it is declared to be; and the table says so."""

from __future__ import annotations

import pytest

from tests.runtime.patterns.catalogue import PATTERNS
from tests.runtime.patterns.running import complaints, try_out
from tests.runtime.patterns.table import PATH, render


@pytest.mark.parametrize("key", PATTERNS)
def test_pattern(key: str) -> None:
    found = complaints(PATTERNS[key], try_out(key))
    assert not found, "\n\n".join(found)


def test_the_table_is_current() -> None:
    assert PATH.read_text() == render(), "run python -m tests.runtime.patterns --write"
