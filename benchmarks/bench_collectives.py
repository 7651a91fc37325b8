"""The runtime's gloo collectives against gloo's own, two ranks, fp32."""

from __future__ import annotations

import warnings

import pytest
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from benchmarks.pair import Operation, Pair
from zerokit.runtime.collectives import Collectives

ROUNDS, WARMUP = 10, 2


def zerokit_all_gather(collectives: Collectives, whole: Tensor) -> None:
    collectives.all_gather(whole, 0, whole.numel()).wait()
    collectives.wait_for_readers()


def zerokit_reduce_scatter(collectives: Collectives, bucket: Tensor) -> None:
    own = bucket.view(collectives.world, -1)[collectives.rank]
    collectives.reduce_scatter(bucket, own, 0, bucket.numel(), add=False).wait()


def gloo_all_gather(collectives: Collectives, whole: Tensor) -> None:
    own = whole.view(collectives.world, -1)[collectives.rank].clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in torch 2.13
        dist.all_gather_into_tensor(whole, own)


def gloo_reduce_scatter(collectives: Collectives, bucket: Tensor) -> None:
    out = bucket.new_empty(bucket.numel() // collectives.world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.reduce_scatter_tensor(out, bucket)


def gloo_all_reduce(collectives: Collectives, bucket: Tensor) -> None:
    """What DDP pays for a bucket; the sum is halved each time so that it stays finite."""
    dist.all_reduce(bucket, op=dist.ReduceOp.SUM)
    bucket.mul_(0.5)


@pytest.mark.parametrize("megabytes", [1, 8, 32])
@pytest.mark.parametrize(
    "operation",
    [zerokit_all_gather, gloo_all_gather, zerokit_reduce_scatter, gloo_reduce_scatter, gloo_all_reduce],
    ids=lambda operation: operation.__name__,
)
def bench_collective(benchmark: BenchmarkFixture, pair: Pair, operation: Operation, megabytes: int) -> None:
    benchmark.group = f"collectives, {megabytes} MB, zerokit's through {pair.collectives.route}"
    run = pair.prepare(operation, megabytes * 250_000 // 128 * 128, ROUNDS + WARMUP)
    benchmark.pedantic(run, rounds=ROUNDS, warmup_rounds=WARMUP)  # type: ignore[no-untyped-call]
