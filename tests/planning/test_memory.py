"""Planned memory is what real ranks hold: at its peak, by kind, at every stage and on two axes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.distributed import run_ranks
from zerokit.bench.engines import zerokit as engine
from zerokit.bench.engines.trainer import make
from zerokit.bench.machine.accelerator import choose_accelerator
from zerokit.bench.measure.memory import MemoryTracker, held_by
from zerokit.bench.plans.subjects import PlanBeside, subject_named, subject_of
from zerokit.bench.record.settings import Settings
from zerokit.bench.worker.training import Batches
from zerokit.bench.workloads.build import build, load
from zerokit.formulas import MEMORY_KINDS
from zerokit.placement import Mesh, placed
from zerokit.planning.memory import StepMemory, element_sizes
from zerokit.planning.replay import Step
from zerokit.planning.trace import Traces
from zerokit.runtime import Precision, ZeroOptimizer

QWEN = "tests.planning.models:qwen"
Peaks = tuple[dict[str, int], dict[str, int]]


def _built(own: dict[str, Any], *args: Any, **options: Any) -> ZeroOptimizer:
    return ZeroOptimizer(*args, **options | own)


def measure_and_plan(settings: list[dict[str, Any]]) -> list[tuple[Peaks, Peaks]]:
    """For each cell rank 0's peaks, at the most and by kind, as tracked in a third step and as planned."""
    found = []
    torch.set_num_threads(1)
    traces: dict[str, Traces] = {}
    for each in settings:
        own: dict[str, Any] = each.get("module_stages", {})
        each = {name: value for name, value in each.items() if name != "module_stages"}
        cell = Settings(nproc_per_node=dist.get_world_size(), device="cpu", **each)
        loaded, accelerator = load(cell), choose_accelerator("cpu")
        key = f"{cell.model} {own} {cell.optimizer}"
        if key not in traces:
            traces[key] = Traces(
                subject_of(loaded),
                on_cuda=False,
                exactly=True,
                module_stages=own,
                optimizer=cell.optimizer,
            )
        stage: dict[str, Any] = {"stage": {**own, "*": cell.stage}} if own else {}
        with patch.object(engine, "ZeroOptimizer", partial(_built, stage)):
            trainer = make(loaded, cell, accelerator)
        batches = Batches(loaded, cell, accelerator.device, ahead=False)
        zero = trainer.zero
        assert zero is not None
        tracker = MemoryTracker(partial(held_by, zero), "cpu") if dist.get_rank() == 0 else None
        for step in range(3):
            ready = batches.of(step * cell.samples_per_step)
            if tracker is None or step < 2:
                trainer.step(ready)
                continue
            tracker.begin_step()
            with tracker:
                trainer.step(ready, tracker.mark)
                tracker.read()
        if tracker is not None:
            readings = [sizes for _, sizes in tracker.readings]
            most = max(readings, key=lambda sizes: sum(sizes.values()))
            highest = {kind: max(sizes[kind] for sizes in readings) for kind in MEMORY_KINDS}
            planned = PlanBeside(
                cell, loaded, zero.runtime.placement, zero.precision, None, traces[key]
            ).planned
            found.append(((most, highest), (planned.peak_bytes, planned.highest_bytes)))
        del trainer
        dist.barrier()
    return found


def require_close(measured: Peaks, planned: Peaks) -> None:
    """1 % for each kind that the layout decides, 3 % for all tensors together."""
    for kind in MEMORY_KINDS[:-1]:
        assert planned[1][kind] == pytest.approx(measured[1][kind], rel=0.01), kind
    assert sum(planned[0].values()) == pytest.approx(sum(measured[0].values()), rel=0.03)


MODELS: list[dict[str, Any]] = [
    {"model": "gpt-tiny", "precision": "bf16", "seq_len": 64, "batch_size": 8, "accumulate": 2, "stage": 2},
    {"model": "gpt-tiny", "precision": "bf16", "seq_len": 64, "batch_size": 8, "accumulate": 2, "stage": 3},
    {"model": "llama-tiny", "precision": "fp32", "seq_len": 64, "batch_size": 8, "stage": 3},
    {"model": "mlp-mnist", "precision": "fp32", "batch_size": 16, "stage": 0},
    {"model": "tests.planning.models:residual", "precision": "fp32", "stage": 1},
    {"model": "gpt-tiny", "precision": "bf16", "seq_len": 64, "batch_size": 8, "stage": 2}
    | {"module_stages": {"blocks.0": 3, "positions": 3}},
    {"model": "llama-tiny", "precision": "fp32", "seq_len": 64, "batch_size": 8, "stage": 3}
    | {"module_stages": {"blocks.0": 0, "norm": 2}},
    {
        "model": "gpt-tiny",
        "precision": "bf16",
        "seq_len": 64,
        "batch_size": 8,
        "stage": 2,
        "optimizer": "muon",
    },
    {"model": "llama-tiny", "precision": "fp32", "seq_len": 64, "batch_size": 8, "stage": 3}
    | {"optimizer": "muon"},
    {"model": "gpt-tiny", "precision": "bf16", "seq_len": 64, "batch_size": 8, "stage": 3, "states": "fp8"},
    {"model": "llama-tiny", "precision": "fp32", "seq_len": 64, "batch_size": 8, "stage": 3}
    | {"optimizer": "muon", "states": "fp8"},
    {"model": QWEN, "precision": "bf16", "seq_len": 64, "batch_size": 1, "stage": 3},
    {"model": "tests.planning.models:dropping", "precision": "fp32", "batch_size": 64, "stage": 2},
]


@pytest.fixture(scope="module")
def peaks() -> list[tuple[Peaks, Peaks]]:
    """Every model is measured in one launch, because importing transformers takes long."""
    found: list[tuple[Peaks, Peaks]] = run_ranks(2, measure_and_plan, MODELS)[0]
    return found


@pytest.mark.parametrize("number", range(len(MODELS)), ids=lambda number: str(MODELS[number]["model"]))
def test_the_peak_of_real_ranks(number: int, peaks: list[tuple[Peaks, Peaks]]) -> None:
    require_close(*peaks[number])


def test_states_on_a_disk_visit_through_two_buffers(tmp_path: Path) -> None:
    model = {"model": "gpt-tiny", "precision": "bf16", "seq_len": 64, "batch_size": 8, "stage": 2}
    ((measured, planned),) = run_ranks(2, measure_and_plan, [model | {"states": str(tmp_path)}])[0]
    more = measured[1]["optimizer"] - planned[1]["optimizer"]
    # Masters and states begin at pages there, and there is room for a page more of each.
    assert 0 <= more <= 2 * 8 * 4096
    require_close(*((now, highest | {"optimizer": 0}) for now, highest in (measured, planned)))


def test_on_two_axes() -> None:
    model = {"model": "gpt-tiny", "precision": "bf16", "seq_len": 64, "batch_size": 8, "mesh": "2x2"}
    cells = [{**model, "stage": inner, "outer_stage": outer} for outer, inner in ((0, 3), (1, 2), (2, 3))]
    for measured, planned in run_ranks(4, measure_and_plan, cells)[0]:
        require_close(measured, planned)


TRACES = Traces(subject_named("gpt-tiny"), on_cuda=False, exactly=True)


OWN: dict[str, Any] = {"blocks.0": 3, "blocks.1.mlp": 0}


@pytest.mark.parametrize(
    ("world", "stage", "home"),
    [
        *((512, 0, "device"), (8, 1, "device"), (64, 2, "device"), (512, 3, "device")),
        *((8, 1, "disk"), (64, 3, "disk"), (1, 0, "fp8"), (64, 3, "fp8")),
        *((64, {**OWN, "*": 2}, "device"), (64, {**OWN, "*": 2}, "disk")),
    ],
)
def test_layout_and_state_of_many_ranks_are_those_of_their_optimizer(
    world: int, stage: Any, home: str, tmp_path: Path
) -> None:
    traces = TRACES
    if isinstance(stage, dict):
        traces = Traces(subject_named("gpt-tiny"), on_cuda=False, exactly=True, module_stages=OWN)
    trace = traces.get(1, "bf16", recompute=False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        where = tmp_path if home == "disk" else home
        optimizer = ZeroOptimizer(
            build("gpt-tiny"), torch.optim.AdamW, stage=stage, precision="bf16", states=where
        )
        layout = trace.layout.for_world(world)
        assert layout.digest() == optimizer.layout.digest()
        rest = stage["*"] if isinstance(stage, dict) else stage
        placement = placed([trace.own_stages.get(unit.index, rest) for unit in layout.units], Mesh(1, world))
        sizes = element_sizes(Precision.of("bf16"), "adamw", layout, placement, home)
        step = Step(layout, placement, sizes, on_cuda=False)
        assert StepMemory(trace, step).of(trace).held == optimizer.predicted_memory()
    finally:
        dist.destroy_process_group()
