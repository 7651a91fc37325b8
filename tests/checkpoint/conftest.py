"""A step of three ranks, made the plain way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import Content, example_content, example_layout, write_run


@pytest.fixture(scope="module")
def content() -> Content:
    return example_content(example_layout(1))


@pytest.fixture
def step(tmp_path: Path, content: Content) -> Path:
    """In the run `tmp_path`/run."""
    return write_run(tmp_path / "run", example_layout(3), content)
