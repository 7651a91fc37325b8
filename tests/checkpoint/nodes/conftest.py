"""A step of eight ranks, and four nodes' directories that have two copies of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import coded, example_content, example_layout, write_run
from tests.support.dealt import deal


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """In the run `tmp_path`/run; with moments in codes, whose scales have slices of their own."""
    layout = example_layout(8)
    return write_run(tmp_path / "run", layout, coded(example_content(layout), layout))


@pytest.fixture
def nodes(step: Path, tmp_path: Path) -> list[Path]:
    """The nodes' runs."""
    return deal(step, tmp_path, nodes=4, copies=2)
