"""Ranks on GPUs: NCCL between several of them, at most eight, and for one rank; gloo for several on one device."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.runtime.test_device_way import late_and_prompt
from tests.support.devices import (
    PRECISIONS,
    SCENES,
    STAGES,
    WIRE,
    Training,
    alone_on_gpu,
    at,
    placed,
    prompt,
    require_deterministic_kernels,
    train,
)
from tests.support.distributed import run_ranks, run_ranks_expecting_errors
from tests.support.on_ranks import on_ranks


@pytest.fixture
def world() -> int:
    """The number of ranks. Skips where there are no two GPUs."""
    count = min(torch.cuda.device_count(), 8)
    if count < 2:
        pytest.skip(f"needs two GPUs, found {count}")
    return count


@pytest.mark.gpu
@pytest.mark.parametrize("stage", STAGES)
def test_late_results_change_no_bit_between_gpus(world: int, stage: int) -> None:
    """Every scene at every stage beside stage 0, where collectives are prompt; precisions by turns."""
    ways: list[Any] = [*PRECISIONS, WIRE]
    cases = [(name, ways[(number + stage) % 4], [stage]) for number, name in enumerate(SCENES)]
    assert run_ranks(world, late_and_prompt, "cuda", cases, timeout=20.0) == [[]] * world


def _rounded_on_both() -> tuple[list[str], list[str]]:
    """The same training by gloo, between tensors of GPUs, and by NCCL."""
    torch.cuda.set_device(dist.get_rank())
    scene = at(SCENES["plain"], stage=2, precision=WIRE)
    by_gloo = train(scene, torch.device("cuda", dist.get_rank()))
    with prompt("cuda") as place:
        return by_gloo, train(scene, place)


@pytest.mark.gpu
def test_a_rounded_wire_has_the_bits_of_another_route(world: int) -> None:
    for by_gloo, by_nccl in run_ranks(world, _rounded_on_both, timeout=20.0):
        assert by_nccl == by_gloo


def _killed(stage: int) -> None:
    with alone_on_gpu("cuda"):
        training = Training(at(SCENES["plain"], stage=stage), placed("cuda"))
        for step in range(3):
            if step == 1 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            training.step(step)
        training.weights()


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 3])
def test_a_killed_rank_ends_the_others(world: int, stage: int) -> None:
    first, second, *_ = run_ranks_expecting_errors(world, _killed, stage, timeout=20.0)
    assert second.exitcode == -signal.SIGKILL
    assert first.raised("ScheduleError"), first.describe()


def _stages_are_identical(device: torch.device, precision: str) -> None:
    """And memory and traffic are what was predicted."""
    for name in ("plain", "accumulation"):
        found = []
        for stage in STAGES:
            training = Training(at(SCENES[name], stage=stage, precision=precision), device)
            optimizer = training.optimizer
            for step in range(training.run.steps):
                training.differentiate(step)
                held = optimizer.memory()
                training.update()
            predicted = optimizer.predicted_traffic(micro_batches=training.run.micro)
            assert held == optimizer.predicted_memory(), (name, precision, stage)
            assert optimizer.traffic().by_operation == predicted.by_operation, (name, precision, stage)
            found.append(training.bits())
        assert found == [found[0]] * len(STAGES), (name, precision)


def _all_stages(backend: str, bound: bool) -> None:
    """On the only GPU."""
    require_deterministic_kernels()
    torch.cuda.set_device(0)
    with alone_on_gpu("cuda" if backend == "nccl" else "cpu", bound=bound):
        for precision in PRECISIONS:
            _stages_are_identical(placed("cuda"), precision)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "world", "bound"),
    [("nccl", 1, False), ("nccl", 1, True), ("gloo", 2, False), ("gloo", 4, False)],
)
def test_stages_are_identical_bits(backend: str, world: int, bound: bool) -> None:
    run_ranks(world, _all_stages, backend, bound, timeout=60.0)


@on_ranks(2)
def test_the_same_the_devices_way() -> None:
    """What is held and moved on a host that takes a device's way is what the tests on a GPU expect there."""
    with prompt("cpu") as place:
        _stages_are_identical(place, "bf16")
