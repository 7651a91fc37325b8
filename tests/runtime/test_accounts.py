"""`memory()` and `traffic()` equal their predictions, the formulas, and what really is held and sent."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerokit
from tests.support.distributed import run_alone, run_ranks
from tests.support.machine import bytes_received, held_bytes, live_storages
from tests.support.models import CASES, count
from tests.support.training import (
    SMALL,
    Run,
    Trajectory,
    build_seeded,
    one_step,
    require_memory_route,
    wrap,
)
from zerokit.runtime.collectives.node import SWITCH, Neighbours

STAGES = (0, 1, 2, 3)
MIDDLE = 0.004


def _up_to_backward(name: str, run: Run, steps: int = 2) -> tuple[Any, zerokit.ZeroOptimizer]:
    """Whole steps first, for the optimizer's states, and then one backward."""
    case = CASES[name]
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    for step in range(steps):
        one_step(model, optimizer, case, run, step, Trajectory())
    batch = case.batch(0, 9, dist.get_rank())
    optimizer.backward(case.loss(model, batch))
    return model, optimizer


def _precisions() -> dict[str, Any]:
    half = zerokit.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
    return {"fp32": "fp32", "bf16": "bf16", "bf16/bf16": half}


def _memories(
    name: str, precision: str, bucket_mb: float
) -> list[tuple[dict[str, int], dict[str, int], int]]:
    case = CASES[name]
    found = []
    for stage in STAGES:
        run = Run(stage=stage, precision=_precisions()[precision], bucket_mb=bucket_mb)
        _model, optimizer = _up_to_backward(name, run)
        memory = optimizer.memory()
        assert memory.total == sum(memory.as_dict().values()) - memory.transient
        found.append((memory.as_dict(), optimizer.predicted_memory().as_dict(), count(case.build())))
    return found


#: Ψ bytes held whole and Ψ bytes divided by N, per stage, for AdamW: parameters + gradients + optimizer.
PAPER = {
    "fp32": [(16, 0), (8, 8), (4, 12), (0, 16)],
    "bf16": [(2 + 4 + 12, 0), (2 + 4, 12), (2, 4 + 12), (0, 2 + 4 + 12)],
    "bf16/bf16": [(16, 0), (4, 12), (2, 14), (0, 16)],
}


# By turns on one, two, three and four ranks.
@pytest.mark.parametrize(
    ("name", "precision", "bucket_mb", "world"),
    [
        ("gpt_groups", "bf16", MIDDLE, 3),
        ("gpt", "bf16/bf16", SMALL, 2),
        ("tiny_parameters", "bf16", SMALL, 4),
        ("lora", "bf16", SMALL, 2),
        ("resnet", "fp32", MIDDLE, 3),
        ("mlp_784_256_10", "fp32", 64.0, 1),
        ("encoder_decoder", "fp32", MIDDLE, 2),
    ],
)
def test_memory_equals_its_prediction_and_the_papers_formula(
    name: str, precision: str, bucket_mb: float, world: int
) -> None:
    ranks = run_ranks(world, _memories, name, precision, bucket_mb)
    for stage in STAGES:
        for found in ranks:
            measured, predicted, _ = found[stage]
            assert measured == predicted, f"stage {stage}"
        # Shards differ by their padding, so the formula holds for the sum over ranks, exactly.
        psi = ranks[0][stage][2]
        whole, divided = PAPER[precision][stage]
        three = sum(sum(r[stage][0][k] for k in ("parameters", "gradients", "optimizer")) for r in ranks)
        assert three == (world * whole + divided) * psi, f"stage {stage}: parameters + gradients + optimizer"
        assert all(r[stage][0]["gathered"] == 0 for r in ranks), "units stay gathered after backward"


def _faked(world: int, name: str) -> list[tuple[int, int, dict[str, int], dict[str, int]]]:
    """(stage, rank, memory, prediction) at every stage, on the first and on the last rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = []
    for rank in (0, world - 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        for stage in STAGES:
            _model, optimizer = _up_to_backward(name, Run(stage=stage))
            memory, predicted = optimizer.memory(), optimizer.predicted_memory()
            found.append((stage, rank, memory.as_dict(), predicted.as_dict()))
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world", [8, 64, 512])
def test_memory_at_world_sizes_that_only_a_fake_process_group_has(world: int) -> None:
    psi = count(CASES["mlp_784_256_10"].build())
    for stage, rank, measured, predicted in run_alone(_faked, world, "mlp_784_256_10"):
        assert measured == predicted
        whole, divided = PAPER["fp32"][stage]
        three = sum(measured[line] for line in ("parameters", "gradients", "optimizer"))
        # A rank's share of each of the four parameters is rounded up to 64 elements, so the last rank has less.
        slack = divided * (4 * 64 + 64)
        assert three <= (whole + divided / world) * psi + slack
        assert three >= (whole + divided / world) * psi - slack or rank == world - 1


def _held(name: str, stage: int, precision: str, bucket_mb: float) -> tuple[int, int, int]:
    """What `memory()` says, what the interpreter holds on top of before, and the slack of whole pages."""
    before = set(live_storages())
    run = Run(stage=stage, precision=precision, bucket_mb=bucket_mb)
    model, optimizer = _up_to_backward(name, run, steps=3)
    held, slack = held_bytes(before)
    assert next(model.modules()) is model
    return optimizer.memory().total, held, slack


# Stage 3 and the others by turns.
@pytest.mark.parametrize(
    ("name", "precision", "bucket_mb", "stage"),
    [
        ("gpt", "fp32", SMALL, 0),
        ("gpt", "fp32", SMALL, 2),
        ("gpt", "fp32", SMALL, 3),
        ("lora", "bf16", SMALL, 1),
        ("lora", "bf16", SMALL, 3),
        ("resnet", "fp32", 64.0, 2),
        ("resnet", "fp32", 64.0, 3),
        ("mlp_784_256_10", "fp32", SMALL, 1),
    ],
)
def test_memory_is_what_the_interpreter_holds(
    name: str, precision: str, bucket_mb: float, stage: int
) -> None:
    """Every storage of a live tensor, found by the garbage collector, is in the report: nothing hides."""
    for reported, held, slack in run_ranks(2, _held, name, stage, precision, bucket_mb):
        assert held - reported <= slack + 4096, (
            f"{held - reported} bytes are held beyond the report of {reported}"
        )
        assert reported - held <= slack, (
            f"the report of {reported} bytes counts {reported - held} that are not held"
        )


# --- traffic -----------------------------------------------------------------------------------------------


def _traffic(name: str, precision: str = "fp32") -> list[dict[str, Any]]:
    """What each stage's third step moved."""
    case, found = CASES[name], []
    for stage in STAGES:
        model = build_seeded(case, 0)
        optimizer = wrap(model, case, Run(stage=stage, precision=precision))
        for step in range(3):
            one_step(model, optimizer, case, Run(), step, Trajectory())
        moved, expected = optimizer.traffic(), optimizer.predicted_traffic()
        found.append(
            {
                "elements": moved.elements,
                "bytes": moved.bytes,
                "expected_elements": expected.elements,
                "expected_bytes": expected.bytes,
                "by_operation": sum(operation.elements for operation in moved.by_operation.values()),
                "psi": count(case.build()),
                "control": moved.control_bytes,
            }
        )
    return found


# By turns on one, two, three and four ranks.
@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("gpt", 2),
        ("tiny_parameters", 4),
        ("unit_unused_on_rank_1", 3),
        ("mlp_784_256_10", 1),
    ],
)
def test_traffic_equals_the_formula(name: str, world: int) -> None:
    """(N-1)·kΨ elements, received, payload, summed over ranks; k = 2, 2, 2 and at most 3."""
    for stages in run_ranks(world, _traffic, name):
        for stage, found in enumerate(stages):
            elements, psi = found["elements"], found["psi"]
            if stage < 3:
                assert elements == 2 * (world - 1) * psi, f"stage {stage}"
            else:
                assert 2 * (world - 1) * psi <= elements <= 3 * (world - 1) * psi
            assert found["bytes"] == 4 * elements
            assert elements == found["expected_elements"] == found["by_operation"]
            assert found["bytes"] == found["expected_bytes"]
            assert found["control"] <= 1024


@pytest.mark.parametrize(
    ("name", "precision"),
    [("lora", "fp32"), ("gpt", "bf16"), ("unit_called_twice", "fp32"), ("tied_inside", "fp32")],
)
def test_traffic_of_frozen_half_and_repeated_units_equals_its_prediction(name: str, precision: str) -> None:
    for stages in run_ranks(2, _traffic, name, precision):
        for stage, found in enumerate(stages):
            assert (found["elements"], found["bytes"]) == (
                found["expected_elements"],
                found["expected_bytes"],
            )
            if name == "gpt" and stage in (1, 2):  # gradients travel in fp32, parameters in bf16
                assert found["bytes"] == (4 + 2) * found["psi"]


def _micro_batches(micro: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    return _moved(micro, True), _moved(micro, False)


def _moved(micro: int, accumulate: bool) -> list[tuple[int, int]]:
    case, found = CASES["gpt"], []
    for stage in STAGES:
        run = Run(stage=stage, micro=micro, accumulate=accumulate)
        model = build_seeded(case, 0)
        optimizer = wrap(model, case, run)
        for step in range(3):
            one_step(model, optimizer, case, run, step, Trajectory())
        reductions = 1 if accumulate else micro
        predicted = optimizer.predicted_traffic(micro_batches=micro, reductions=reductions)
        found.append((optimizer.traffic().elements, predicted.elements))
    return found


def test_traffic_of_micro_batches() -> None:
    """Inside accumulate() gradients travel once; without it, at stages 2 and 3, with every micro-batch."""
    micro = 2
    psi = count(CASES["gpt"].build())
    for inside, outside in run_ranks(2, _micro_batches, micro):
        for stage, (elements, predicted) in enumerate(inside):
            assert elements == predicted
            assert elements == 2 * psi if stage < 3 else elements <= (2 * micro + 1) * psi
        for stage, (elements, predicted) in enumerate(outside):
            assert elements == predicted
            if stage == 2:
                assert elements == (micro + 1) * psi
            if stage == 3:
                assert elements <= 3 * micro * psi


def _count_reads(total: list[int]) -> None:
    """Add to `total[0]` what this process reads from others from now on."""
    original = Neighbours.read

    def read(self: Neighbours, peer: int, number: int, into: Tensor) -> None:
        original(self, peer, number, into)
        total[0] += into.numel() * into.element_size()

    Neighbours.read = read  # type: ignore[method-assign, assignment]


def _really_received(stage: int, steps: int, sockets: bool, precision: Any = "fp32") -> tuple[int, int]:
    """(bytes that this rank's sockets, or its reads of others' memory, brought in `steps` steps, and the reports' claim
    for all ranks)."""
    read = [0]
    if sockets:
        os.environ[SWITCH] = "0"
    else:
        _count_reads(read)
    case, run = CASES["mlp_784_256_10"], Run(stage=stage, precision=precision)
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    claimed = 0
    for step in range(3):
        one_step(model, optimizer, case, run, step, Trajectory())
    # Gathers of updated parameters are still on their way after a step; they count for the next one.
    time.sleep(0.2)
    dist.barrier()
    before = bytes_received() if sockets else read[0]
    for step in range(3, 3 + steps):
        one_step(model, optimizer, case, run, step, Trajectory())
        claimed += optimizer.traffic().bytes
    time.sleep(0.2)
    dist.barrier()
    return (bytes_received() if sockets else read[0]) - before, claimed


@pytest.mark.parametrize(
    ("world", "stage", "sockets"),
    [(2, 0, True), (2, 1, False), (3, 2, True), (3, 2, False), (2, 3, True), (3, 3, False)],
)
def test_ranks_received_what_traffic_says(world: int, stage: int, sockets: bool) -> None:
    if not sockets:
        require_memory_route()
    _require_what_traffic_says(run_ranks(world, _really_received, stage, 4, sockets))


@pytest.mark.parametrize(("stage", "sockets"), [(0, True), (2, False)])
def test_ranks_received_half_the_bytes_of_gradients_on_a_bf16_wire(stage: int, sockets: bool) -> None:
    if not sockets:
        require_memory_route()
    wire = zerokit.Precision(wire=torch.bfloat16)
    ranks = run_ranks(2, _really_received, stage, 4, sockets, wire)
    _require_what_traffic_says(ranks)
    assert ranks[0][1] == 4 * (2 + 4) * count(CASES["mlp_784_256_10"].build())


def _require_what_traffic_says(ranks: list[tuple[int, int]]) -> None:
    received, claimed = sum(found for found, _ in ranks), ranks[0][1]
    assert claimed <= received, "traffic() claims more than arrived"
    assert received <= 1.02 * claimed + 65536, f"{received} bytes arrived, traffic() says {claimed}"


def test_the_papers_table() -> None:
    """7.5 B parameters on 64 ranks, mixed precision: 120, 31.4, 16.6 and 1.88 GB (ZeRO, figure 1)."""
    table = [120.0, 31.4, 16.6, 1.88]
    for (whole, divided), gigabytes in zip(PAPER["bf16/bf16"], table, strict=True):
        assert math.isclose((whole + divided / 64) * 7.5, gigabytes, rel_tol=0.005)
