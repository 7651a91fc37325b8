"""The layout of a 70B model at 1024 ranks: what construction, manifests and plans ask of it."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from zerokit.layout import Layout, Parameter, Segment, build_layout

WORLD = 1024
LAYERS, WIDTH, HIDDEN, KEY_VALUE, VOCABULARY = 80, 8192, 28_672, 1024, 128_256
BUCKET_BYTES = 25_000_000


def llama_70b() -> list[Segment]:
    """Shapes of Llama 3 70B."""
    shapes = {
        "attention_norm": (WIDTH,),
        "query": (WIDTH, WIDTH),
        "key": (KEY_VALUE, WIDTH),
        "value": (KEY_VALUE, WIDTH),
        "out": (WIDTH, WIDTH),
        "mlp_norm": (WIDTH,),
        "gate": (HIDDEN, WIDTH),
        "up": (HIDDEN, WIDTH),
        "down": (WIDTH, HIDDEN),
    }
    blocks = []
    for layer in range(LAYERS):
        scope = f"blocks.{layer}"
        members = tuple(Parameter(f"{scope}.{name}.weight", shape) for name, shape in shapes.items())
        blocks.append(Segment(scope, members))
    first = Segment(None, (Parameter("tokens.weight", (VOCABULARY, WIDTH)),))
    last = Segment(None, (Parameter("norm.weight", (WIDTH,)), Parameter("head.weight", (VOCABULARY, WIDTH))))
    return [first, *blocks, last]


@pytest.fixture(scope="module")
def layout() -> Layout:
    built = build_layout(llama_70b(), world=WORLD, bucket_bytes=BUCKET_BYTES)
    assert 70e9 < built.trainable_numel < 71e9
    return built


def bench_build(benchmark: BenchmarkFixture) -> None:
    benchmark(lambda: build_layout(llama_70b(), world=WORLD, bucket_bytes=BUCKET_BYTES))


def bench_digest(benchmark: BenchmarkFixture, layout: Layout) -> None:
    benchmark(layout.digest)


def bench_one_rank(benchmark: BenchmarkFixture, layout: Layout) -> None:
    """What one rank owns of every unit."""
    benchmark(lambda: [list(unit.owned(WORLD // 2)) for unit in layout.units])


def bench_every_cut(benchmark: BenchmarkFixture, layout: Layout) -> None:
    """Where every parameter lies on all ranks: what a manifest holds."""

    def cuts() -> int:
        return sum(len(layout.cuts(parameter.name)) for parameter in layout.parameters)

    pieces = benchmark.pedantic(cuts, rounds=3)  # type: ignore[no-untyped-call]
    assert pieces >= WORLD
