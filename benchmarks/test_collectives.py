"""One gather and one reduction on each road, of all ranks' 16 MiB: neighbours' memory, sockets, NCCL; beside torch's.

Two gloo ranks of one thread each, or a rank on each GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.elsewhere import elsewhere, replay, slowest, take_turns
from benchmarks.ranks import run_ranks
from tests.support.recording import plain_unit
from zerokit.runtime.collectives import Collectives, Exchange, make_collectives
from zerokit.runtime.collectives.host.node import SWITCH
from zerokit.runtime.shards import Shards

WORLD, NUMEL = 2, 4 << 20
"""Ranks, and elements of a unit in fp32."""
HOST = ("zerokit, memory", "zerokit, sockets", "torch, gloo")
CUDA = ("zerokit, NCCL", "torch, NCCL")
Times = dict[str, list[float]]


def measure(kind: str, rounds: int) -> tuple[Times, Times]:
    """Seconds of gathers and of reductions on this rank, by road."""
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    group, world, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    assert group is not None
    roads = dict[str, Collectives]()
    if kind == "cuda":
        roads["zerokit, NCCL"] = make_collectives(group, device, None, units=1)
    else:
        for name, switch in (("memory", "1"), ("sockets", "0")):
            os.environ[SWITCH] = switch
            road = make_collectives(group, device, None, units=1)
            if road.route == name:  # some systems forbid to read neighbours' memory
                roads[f"zerokit, {name}"] = road
    numel = NUMEL // world * world
    unit = plain_unit(0, numel, world)
    whole, own = torch.zeros(numel, device=device), torch.zeros(numel // world, device=device)

    def done() -> None:
        if kind == "cuda":
            torch.cuda.synchronize()

    def ready(name: str) -> None:
        done()
        dist.barrier()

    def by(road: Collectives, exchange: Exchange) -> Callable[[], None]:
        def call() -> None:
            exchange.start().wait()
            road.wait_for_readers()
            done()

        return call

    def torch_gather() -> None:
        dist.all_gather_into_tensor(whole, own)
        done()

    def torch_reduction() -> None:
        dist.reduce_scatter_tensor(own, whole)
        done()

    bucket, shard = Shards(unit, whole), Shards(unit, own, unit.shard(rank))
    gathers = {name: by(road, road.gather(bucket, own=shard)) for name, road in roads.items()}
    reductions = {name: by(road, road.reduction(bucket, shard)) for name, road in roads.items()}
    peer = (CUDA if kind == "cuda" else HOST)[-1]
    return (
        take_turns(gathers | {peer: torch_gather}, rounds, ready),
        take_turns(reductions | {peer: torch_reduction}, rounds, ready),
    )


def _measured(kind: str, world: int, rounds: int) -> tuple[Times, Times]:
    backend = "nccl" if kind == "cuda" else "gloo"
    found = run_ranks(measure, kind, rounds, world=world, backend=backend)
    return slowest([gathers for gathers, _ in found]), slowest([reductions for _, reductions in found])


@pytest.fixture(scope="module")
def on_hosts(rounds: int) -> tuple[Times, Times]:
    return _measured("cpu", WORLD, rounds)


@pytest.fixture(scope="module")
def on_gpus(rounds: int) -> tuple[Times, Times]:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return _measured("cuda", torch.cuda.device_count(), rounds)


def _replay(benchmark: BenchmarkFixture, times: Times, how: str) -> None:
    if how not in times:
        benchmark.skipped = True
        pytest.skip("this system does not let ranks read each other's memory")
    replay(benchmark, times[how])


@pytest.mark.benchmark(group=f"gather: {NUMEL >> 18} MiB on {WORLD} ranks", timer=elsewhere)
@pytest.mark.parametrize("how", HOST)
def test_gather(benchmark: BenchmarkFixture, on_hosts: tuple[Times, Times], how: str) -> None:
    _replay(benchmark, on_hosts[0], how)


@pytest.mark.benchmark(group=f"reduction: {NUMEL >> 18} MiB on {WORLD} ranks", timer=elsewhere)
@pytest.mark.parametrize("how", HOST)
def test_reduction(benchmark: BenchmarkFixture, on_hosts: tuple[Times, Times], how: str) -> None:
    _replay(benchmark, on_hosts[1], how)


@pytest.mark.benchmark(group=f"gather: {NUMEL >> 18} MiB on all GPUs", timer=elsewhere)
@pytest.mark.parametrize("how", CUDA)
def test_gather_on_gpus(benchmark: BenchmarkFixture, on_gpus: tuple[Times, Times], how: str) -> None:
    replay(benchmark, on_gpus[0][how])


@pytest.mark.benchmark(group=f"reduction: {NUMEL >> 18} MiB on all GPUs", timer=elsewhere)
@pytest.mark.parametrize("how", CUDA)
def test_reduction_on_gpus(benchmark: BenchmarkFixture, on_gpus: tuple[Times, Times], how: str) -> None:
    replay(benchmark, on_gpus[1][how])
