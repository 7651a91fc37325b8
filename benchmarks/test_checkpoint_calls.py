"""`zerokit.save` and `zerokit.load`: on one rank beside DCP's, and a background save on two ranks that train on.

A background save holds the training until it returns, which should take about as long as one copy of the state.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture

import zerokit
from benchmarks.checkpoint_calls import LOADS, SAVES, measure, trained
from benchmarks.elsewhere import elsewhere, replay, slowest, take_turns
from benchmarks.ranks import run_ranks
from zerokit.bench.machine.host import cores
from zerokit.checkpoint.together import Saving

Times = dict[str, list[float]]
WORLD, ROWS = 2, 64


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory, size_mb: float, rounds: int) -> Times:
    work = str(tmp_path_factory.mktemp("calls"))
    return slowest(run_ranks(measure, work, size_mb, rounds, world=1, threads=cores()))


@pytest.mark.benchmark(group="save: one rank, to the disk", timer=elsewhere)
@pytest.mark.parametrize("how", SAVES)
def test_save(benchmark: BenchmarkFixture, calls: Times, how: str) -> None:
    replay(benchmark, calls[how])


@pytest.mark.benchmark(group="load: one rank", timer=elsewhere)
@pytest.mark.parametrize("how", LOADS)
def test_load(benchmark: BenchmarkFixture, calls: Times, how: str) -> None:
    replay(benchmark, calls[how])


def hold(directory: str, size_mb: float, rounds: int) -> Times:
    """Seconds for which this rank could not train, and those of a copy of its state."""
    optimizer, step = trained(size_mb, rows=ROWS, world=WORLD)
    state = [
        tensor
        for flat in optimizer.runtime.inner.param_groups[0]["params"]
        for tensor in (flat.detach(), *optimizer.runtime.inner.state[flat].values())
        if tensor.dim()
    ]
    buffer, saving, number = torch.zeros(sum(tensor.numel() for tensor in state)), list[Saving](), 0

    def copy() -> None:
        start = 0
        for tensor in state:
            buffer[start : start + tensor.numel()].copy_(tensor)
            start += tensor.numel()

    def save() -> None:
        nonlocal number
        number += 1
        saving.append(zerokit.save(Path(directory), optimizer, step=number, blocking=False, keep_last=1))

    def train_to_its_end(name: str) -> None:
        while saving:
            step()
            busy = torch.tensor(0.0 if saving[0].done() else 1.0)
            dist.all_reduce(busy)
            if not busy.item():
                saving.pop().wait()
        dist.barrier()

    held = take_turns({"zerokit.save, blocking=False": save, "one copy": copy}, rounds, train_to_its_end)
    train_to_its_end("")
    return held


@pytest.fixture(scope="module")
def holds(tmp_path_factory: pytest.TempPathFactory, size_mb: float, rounds: int) -> Times:
    work = str(tmp_path_factory.mktemp("background"))
    return slowest(run_ranks(hold, work, size_mb, rounds, world=WORLD))


@pytest.mark.benchmark(group=f"background save: how long {WORLD} ranks are held", timer=elsewhere)
@pytest.mark.parametrize("how", ["zerokit.save, blocking=False", "one copy"])
def test_background_save(benchmark: BenchmarkFixture, holds: Times, how: str) -> None:
    replay(benchmark, holds[how])
