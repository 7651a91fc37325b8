"""The layout, what a rank owns, and `zerokit.plan`: arithmetic before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.utils.flop_counter import FlopCounterMode

import zerokit
from benchmarks.elsewhere import InTurns, elsewhere
from zerokit.bench.catalogue.workloads import GPTConfig, describe
from zerokit.bench.workloads.build import build_model
from zerokit.layout import Layout, Parameter, Segment, build_layout

WORLD, BLOCKS, WIDTH, BUCKET_BYTES = 64, 80, 8192, 25 << 20
SHAPES = (
    *((WIDTH, WIDTH), (WIDTH // 8, WIDTH), (WIDTH // 8, WIDTH), (WIDTH, WIDTH)),
    *((4 * WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,), (WIDTH,)),
)
"""A block of a Llama of 70 billion parameters, about."""


def _layout() -> Layout:
    blocks = (
        Segment(f"{block}", tuple(Parameter(f"{block}.{n}", shape) for n, shape in enumerate(SHAPES)))
        for block in range(BLOCKS)
    )
    return build_layout(blocks, world=WORLD, bucket_bytes=BUCKET_BYTES)


@pytest.mark.benchmark(
    group=f"layout: {BLOCKS * len(SHAPES)} parameters to units, for {WORLD} ranks", timer=elsewhere
)
@pytest.mark.parametrize("how", ["zerokit", "DDP, buckets"])
def test_layout(in_turns: InTurns, how: str) -> None:
    tensors = [torch.empty(shape, device="meta") for _ in range(BLOCKS) for shape in SHAPES]
    calls: dict[str, Callable[[], object]] = {
        "zerokit": _layout,
        "DDP, buckets": lambda: _compute_bucket_assignment_by_size(tensors, [BUCKET_BYTES]),
    }
    in_turns(how, calls)
    assert calls[how]()


@pytest.mark.benchmark(group=f"layout: what one of {WORLD} ranks owns", timer=elsewhere)
@pytest.mark.parametrize("how", ["zerokit", "DTensor"])
def test_owned(in_turns: InTurns, how: str) -> None:
    layout, rank = _layout(), WORLD // 2

    def by_dtensor() -> list[object]:
        return [
            _compute_local_shape_and_global_offset(shape, (WORLD,), [rank], [Shard(0)])
            for _ in range(BLOCKS)
            for shape in SHAPES
        ]

    calls: dict[str, Callable[[], object]] = {
        "zerokit": lambda: list(layout.owned(rank)),
        "DTensor": by_dtensor,
    }
    in_turns(how, calls)
    assert calls[how]()


@pytest.mark.benchmark(group="plan: gpt-34m on 8 GPUs", timer=elsewhere)
@pytest.mark.parametrize("how", ["zerokit", "torch, FLOPs of a step"])
def test_plan(in_turns: InTurns, how: str) -> None:
    config = describe("gpt-34m").config
    assert isinstance(config, GPTConfig)

    def flops() -> int:
        with torch.device("meta"):
            model = build_model(config, None, seed=0)
            tokens = torch.zeros((1, 128), dtype=torch.int64)
            with FlopCounterMode(display=False) as counter:
                model(tokens, tokens).backward()
        total: int = counter.get_total_flops()
        return total

    def zerokit_plan() -> object:
        return zerokit.plan("gpt-34m", gpus=8, device="h100-80")

    in_turns(how, {"zerokit": zerokit_plan, "torch, FLOPs of a step": flops})
