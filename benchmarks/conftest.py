"""What the micro-benchmarks share: the size of checkpoints, and one of them on the disk.

pytest benchmarks/
pytest benchmarks/test_checkpoint_calls.py --size-mb 2000 --basetemp /mnt/disk/work
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.elsewhere import InTurns, replay, take_turns
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
    """The least rounds, those of `--benchmark-min-rounds`."""
    config = request.config
    return 1 if config.getoption("benchmark_disable") else int(config.getoption("benchmark_min_rounds"))


@pytest.fixture(scope="session")
def measured() -> dict[str, dict[str, list[float]]]:
    """The seconds of `in_turns`, by group and name."""
    return {}


@pytest.fixture
def in_turns(
    benchmark: BenchmarkFixture,
    measured: dict[str, dict[str, list[float]]],
    rounds: int,
    request: pytest.FixtureRequest,
) -> InTurns:
    """Measures this benchmark, which has the timer `elsewhere`, and all others of its group at the first of them."""
    option = request.config.getoption
    seconds = 0.0 if option("benchmark_disable") else float(option("benchmark_max_time"))

    def measure(
        how: str,
        calls: Mapping[str, Callable[[], object]],
        before: Callable[[str], object] = lambda name: None,
    ) -> None:
        group = str(benchmark.group)
        if group not in measured:
            measured[group] = take_turns(calls, rounds, before, seconds)
        replay(benchmark, measured[group][how])

    return measure
