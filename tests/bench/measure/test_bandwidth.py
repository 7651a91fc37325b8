"""Bandwidth by nccl-tests' definitions, against bytes that are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_ranks
from zerokit.bench.engines.trainer import make
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.measure import bandwidth
from zerokit.bench.measure.bandwidth import LEAST, MOST, WARMUP, bandwidth_of, measure_bandwidth
from zerokit.bench.record.measured import Bandwidth
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import load

HERE = Accelerator(torch.device("cpu"), "gloo")


def test_the_table_of_nccl_tests() -> None:
    """8 ranks, 1 GB in a median of 10 ms: 100 GB/s, times 1.75, 0.875, 0.875 and 1."""
    operations = "all_reduce", "all_gather", "reduce_scatter", "broadcast"
    found = [bandwidth_of(operation, "torch", 10**9, 8, [9.0, 0.01, 0.002]) for operation in operations]
    assert [one.algorithm_gb_per_s for one in found] == pytest.approx([100.0] * 4)
    assert [one.bus_gb_per_s for one in found] == pytest.approx([175.0, 87.5, 87.5, 100.0])
    assert [one.ms for one in found] == pytest.approx([10.0] * 4)


def measure_all(world: int) -> list[tuple[list[Bandwidth], dict[str, int], int, int]]:
    """On a rank, on both wires: what was measured, the calls and bytes counted meanwhile, and bytes of the unit."""
    bandwidth.BUDGET_S = 0.001
    base = Settings(
        stage=3, model="gpt-tiny", precision="fp32", seq_len=16, nproc_per_node=world, data="synthetic"
    )
    own = []
    for settings in (base, replace(base, wire="bf16")):
        loaded = load(settings)
        trainer = make(loaded, settings, HERE)
        assert trainer.zero is not None
        found = measure_bandwidth(trainer)
        moved = trainer.zero.runtime.collectives.traffic
        largest = max(trainer.zero.layout.units, key=lambda unit: unit.numel)
        calls = {name: tally.calls for name, tally in moved.by_operation.items()}
        own.append((found, calls, moved.received_bytes, largest.numel * 4))
        trainer.step([loaded.batch(dist.get_rank())])  # the engine is none the worse for it
    return own


def test_collectives_on_three_ranks_among_which_little_can_be_divided_evenly() -> None:
    for own in run_ranks(3, measure_all, 3):
        for (found, calls, received, unit_bytes), divisor in zip(own, (1, 2), strict=True):  # fp32 and bf16
            assert [(one.operation, one.by, one.size_bytes) for one in found] == [
                ("all_gather", "zerokit", unit_bytes),
                ("reduce_scatter", "zerokit", unit_bytes // divisor),
            ]
            for one in found:
                assert WARMUP + LEAST <= calls[one.operation] <= WARMUP + MOST
                assert one.algorithm_gb_per_s == pytest.approx(one.size_bytes / one.ms / 1e6)
            # What the bus bandwidth says a call brings to a rank is what the runtime counted to have arrived.
            brought = (calls[one.operation] * one.bus_gb_per_s * one.ms * 1e6 for one in found)
            assert sum(brought) == pytest.approx(received)
