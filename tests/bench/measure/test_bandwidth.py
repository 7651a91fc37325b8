"""Bandwidth by nccl-tests' definitions, against bytes that are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.support.distributed import run_ranks
from zerokit.bench.engines.trainer import make
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.measure import bandwidth
from zerokit.bench.measure.bandwidth import LEAST, MOST, WARMUP, bandwidth_of, bus_factor, measure_bandwidth
from zerokit.bench.record import Bandwidth
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import load

HERE = Accelerator(torch.device("cpu"), "gloo")
OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]


def test_the_table_of_nccl_tests() -> None:
    """8 ranks, 1 GB in 10 ms: 100 GB/s, times 1.75, 0.875, 0.875 and 1."""
    found = [bandwidth_of(operation, "torch", 10**9, 8, [0.01]) for operation in OPERATIONS]
    assert [one.algorithm_gb_per_s for one in found] == pytest.approx([100.0] * 4)
    assert [one.bus_gb_per_s for one in found] == pytest.approx([175.0, 87.5, 87.5, 100.0])
    assert [one.ms for one in found] == pytest.approx([10.0] * 4)


@given(st.integers(2, 4096))
def test_all_reduce_is_a_reduce_scatter_and_an_all_gather(world: int) -> None:
    both = bus_factor("reduce_scatter", world) + bus_factor("all_gather", world)
    assert bus_factor("all_reduce", world) == pytest.approx(both)
    # On a ring every rank sends N−1 pieces of a buffer's N-th part.
    assert bus_factor("all_gather", world) == pytest.approx((world - 1) * (1 / world))


def test_the_median_time_counts() -> None:
    found = bandwidth_of("broadcast", "torch", 4000, 2, [1.0, 2.0, 50.0])
    assert (found.ms, found.algorithm_gb_per_s) == (2000.0, 2e-6)


def settings_of(engine: str, stage: int, world: int) -> Settings:
    return Settings(
        engine=engine,
        stage=stage,
        model="gpt-tiny",
        precision="fp32",
        seq_len=16,
        data="synthetic",
        nproc_per_node=world,
    )


def measure_zerokit(world: int, wire: str) -> tuple[list[Bandwidth], dict[str, int], int, int]:
    """On a rank: what was measured, and what the runtime counted meanwhile."""
    settings = replace(settings_of("zerokit", 3, world), wire=wire)
    loaded = load(settings)
    trainer = make(loaded, settings, HERE)
    assert trainer.zero is not None
    counters = trainer.zero.parts.collectives.counters
    found = measure_bandwidth(trainer, loaded.model.parameters, settings, HERE)
    largest = max(trainer.zero.layout.units, key=lambda unit: unit.numel)
    calls = {name: tally.calls for (name, _), tally in counters.by_operation.items()}
    received = counters.received_bytes
    trainer.step([loaded.batch(dist.get_rank())])  # the engine is none the worse for it
    return found, calls, received, largest.numel * 4


@pytest.mark.parametrize(("world", "wire"), [(2, "own"), (3, "own"), (2, "bf16")])
def test_zerokits_own_at_its_largest_unit_against_its_counters(world: int, wire: str) -> None:
    for found, calls, received, size in run_ranks(world, measure_zerokit, world, wire):
        assert [(one.operation, one.by, one.size_bytes) for one in found] == [
            ("all_gather", "zerokit", size),
            ("reduce_scatter", "zerokit", size // 2 if wire == "bf16" else size),
        ]
        for one in found:
            assert WARMUP + LEAST <= calls[one.operation] <= WARMUP + MOST
            assert one.algorithm_gb_per_s == pytest.approx(one.size_bytes / one.ms / 1e6)
        # What the bus bandwidth says a call brings to a rank is what the runtime counted to have arrived.
        total = sum(calls[one.operation] * one.bus_gb_per_s * one.ms * 1e6 for one in found)
        assert total == pytest.approx(received)


def measure_torchs(world: int) -> dict[str, list[Bandwidth]]:
    """On a rank: the collectives of every peer; the engines themselves are not needed."""
    bandwidth.BUDGET_S = 0.001
    settings = settings_of("zerokit", 0, world)
    trainer = make(load(settings), settings, HERE)
    peer: Any = trainer
    peer.zero = None  # so that it counts as a peer
    return {
        engine: measure_bandwidth(trainer, 1001, settings_of(engine, stage, world), HERE)
        for engine, stage in (("ddp", 0), ("fsdp2", 3), ("compute-only", 0), ("zero-redundancy-optimizer", 1))
    } | {
        "ddp in bf16": measure_bandwidth(
            trainer, 1001, replace(settings_of("ddp", 0, world), wire="bf16"), HERE
        )
    }


def test_peers_have_torchs_collectives_over_a_bucket() -> None:
    found = run_ranks(2, measure_torchs, 2)
    for by_engine in found:
        assert {engine: [one.operation for one in several] for engine, several in by_engine.items()} == {
            "ddp": ["all_reduce"],
            "ddp in bf16": ["all_reduce"],
            "fsdp2": ["all_gather", "reduce_scatter"],
            "compute-only": [],
            "zero-redundancy-optimizer": ["all_reduce", "broadcast"],
        }
        several = [one for many in by_engine.values() for one in many]
        assert all(one.by == "torch" and one.ms > 0.0 for one in several)
        for engine, many in by_engine.items():
            assert {one.size_bytes for one in many} <= {1002 * (2 if engine == "ddp in bf16" else 4)}
    assert found[0] == found[1]


def measure_alone() -> list[Bandwidth]:
    settings = settings_of("zerokit", 2, 1)
    loaded = load(settings)
    return measure_bandwidth(make(loaded, settings, HERE), loaded.model.parameters, settings, HERE)


def test_one_rank_has_no_wire() -> None:
    assert run_ranks(1, measure_alone) == [[]]
