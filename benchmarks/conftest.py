"""What the micro-benchmarks share: the size of checkpoints, and one of them on the disk.

pytest benchmarks/
pytest benchmarks/test_checkpoint_calls.py --size-mb 2000 --basetemp /mnt/disk/work
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.synthetic import make_checkpoint
from zerokit.checkpoint.reader import Checkpoint

WORLD = 4
"""Ranks of the checkpoint."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("zerokit")
    group.addoption("--size-mb", type=float, default=50.0, help="size of checkpoints, in 10^6 bytes")


@pytest.fixture(scope="session")
def size_mb(request: pytest.FixtureRequest) -> float:
    """Size of checkpoints, in 10^6 bytes."""
    size: float = request.config.getoption("--size-mb")
    if size <= 0:
        raise pytest.UsageError(f"--size-mb {size:g}: expected a positive number")
    return size


@pytest.fixture(scope="session")
def step(tmp_path_factory: pytest.TempPathFactory, size_mb: float) -> Path:
    """A checkpoint of a transformer's shapes, masters and two moments in fp32."""
    path = tmp_path_factory.mktemp("checkpoint") / "step-00000001"
    make_checkpoint(path, size_mb / 1000, WORLD)
    return path


@pytest.fixture(scope="session")
def checkpoint(step: Path) -> Checkpoint:
    """It, opened."""
    return Checkpoint(step)


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """Rounds of what processes of their own measure: at least those of `--benchmark-min-rounds`."""
    config = request.config
    return 1 if config.getoption("benchmark_disable") else int(config.getoption("benchmark_min_rounds"))
