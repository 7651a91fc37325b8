"""Stages on a GPU: NCCL for one rank, bound to its device or not, and gloo for several ranks on one device."""

from __future__ import annotations

import pytest
import torch

from tests.support.devices import (
    PRECISIONS,
    SCENES,
    STAGES,
    Scene,
    Training,
    alone_on_gpu,
    at,
    placed,
    prompt,
    require_deterministic_kernels,
)
from tests.support.distributed import run_ranks
from tests.support.on_ranks import on_ranks


def _train_and_count(scene: Scene, device: torch.device) -> tuple[list[str], bool, bool]:
    """Bits, and whether memory and traffic are what was predicted."""
    training = Training(scene, device)
    for step in range(scene.run.steps):
        training.differentiate(step)
        held = training.optimizer.memory()
        training.update()
    optimizer = training.optimizer
    predicted = optimizer.predicted_traffic(micro_batches=scene.run.micro)
    return (
        training.bits(),
        held == optimizer.predicted_memory(),
        optimizer.traffic().by_operation == predicted.by_operation,
    )


def _all_stages(backend: str, bound: bool) -> dict[str, list[tuple[list[str], bool, bool]]]:
    """By scene and precision: every stage, on the only GPU."""
    require_deterministic_kernels()
    torch.cuda.set_device(0)
    with alone_on_gpu("cuda" if backend == "nccl" else "cpu", bound=bound):
        return {
            f"{name}, {precision}": [
                _train_and_count(at(SCENES[name], stage=stage, precision=precision), placed("cuda"))
                for stage in STAGES
            ]
            for name in ("plain", "accumulation")
            for precision in PRECISIONS
        }


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "world", "bound"),
    [("nccl", 1, False), ("nccl", 1, True), ("gloo", 2, False), ("gloo", 4, False)],
)
def test_stages_are_identical_bits(backend: str, world: int, bound: bool) -> None:
    for results in run_ranks(world, _all_stages, backend, bound, timeout=60.0):
        for case, stages in results.items():
            for stage, (bits, memory, traffic) in enumerate(stages):
                assert bits == stages[0][0], f"{case}: stage {stage} differs from stage 0"
                assert memory, f"{case}, stage {stage}: memory() is not its prediction"
                assert traffic, f"{case}, stage {stage}: traffic() is not its prediction"


@on_ranks(2, ("plain", "accumulation"))
def test_the_same_the_devices_way(name: str) -> None:
    """What is held and moved on a host that takes a device's way is what the tests on a GPU expect there."""
    with prompt("cpu") as place:
        stages = [
            _train_and_count(at(SCENES[name], stage=stage, precision="bf16"), place) for stage in STAGES
        ]
    assert stages == [(stages[0][0], True, True)] * len(STAGES)
