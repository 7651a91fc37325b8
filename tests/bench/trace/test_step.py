"""The timeline of a step on real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.bench.trace.reading import (
    IN_FLIGHT,
    require_form,
    require_overlap,
    require_traffic,
    spans_of,
)
from tests.support.distributed import run_ranks
from tests.support.streams import PromptStream, device_way
from zerokit.bench.engines.trainer import Batch, Mark, Trainer, make
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.record.settings import Settings
from zerokit.bench.trace.step import trace_step
from zerokit.bench.worker.training import Loop
from zerokit.bench.workloads.build import load
from zerokit.placement import Mesh
from zerokit.training import ZeroOptimizer

HERE = Accelerator(torch.device("cpu"), "gloo")
TINY = Settings(model="gpt-tiny", seq_len=16, nproc_per_node=2, precision="fp32", bucket_mb=0.01)


def traced(settings: Settings, steps: int = 1) -> dict[str, Any] | None:
    """The trace of a bench's cell, after some steps."""
    loaded = load(settings)
    trainer = make(loaded, settings, HERE)
    batches = Loop(trainer, loaded, settings, HERE).batches
    for step in range(steps):
        trainer.step(batches(step))
    return trace_step(trainer, batches)


def trace_on_ranks(settings: Settings) -> dict[str, Any]:
    content, *others = run_ranks(settings.world, traced, settings)
    assert others == [None] * (settings.world - 1)
    require_form(content, settings.world)
    require_traffic(content, settings.world)
    return cast("dict[str, Any]", content)


def names(content: dict[str, Any], track: str, rank: int = 0) -> list[str]:
    spans = sorted(spans_of(content, rank), key=lambda span: float(span["ts"]))
    return [span["name"] for span in spans if span["cat"] == track]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks(stage: int) -> None:
    content = trace_on_ranks(replace(TINY, stage=stage, accumulate=2))
    calls = sum(one["calls"] for one in content["otherData"]["traffic"].values())
    assert require_overlap(content, Mesh(1, 2)) == 2 * calls > 0
    for rank in range(2):
        assert names(content, "step", rank) == ["forward", "backward"] * 2 + ["optimizer"]
        assert names(content, "update", rank) == ["update"]
        compute = names(content, "compute", rank)
        forward = ["tokens", "positions", "blocks.0", "blocks.1", "norm", "head"]
        backward = ["head", "norm", "blocks.1", "blocks.0", "positions", "tokens"]
        once = [*(f"forward {path}" for path in forward), *(f"backward {path}" for path in backward)]
        assert compute == once * 2
    clocks = content["otherData"]["clocks"]
    assert [clock["rank"] for clock in clocks] == [0, 1]
    assert {(clock["offset_ms"], clock["uncertainty_ms"]) for clock in clocks} == {(0.0, 0.0)}


def test_parts_of_a_step_lie_in_it() -> None:
    content = trace_on_ranks(replace(TINY, stage=3))
    for rank in range(2):
        spans = spans_of(content, rank)
        phases = {
            span["name"]: (span["ts"], span["ts"] + span["dur"]) for span in spans if span["cat"] == "step"
        }
        for span in spans:
            start, stop = span["ts"], span["ts"] + span["dur"]
            if span["cat"] == "compute":
                begin, end = phases[span["name"].split()[0]]
                assert begin - 0.01 <= start <= stop <= end + 0.01
            elif span["cat"] == "update":
                begin, end = phases["optimizer"]
                assert begin <= start < stop <= end
        assert phases["forward"][1] <= phases["backward"][0] + 0.01
        assert any(span["name"].startswith("wait for all-gather") for span in spans)


@pytest.mark.parametrize(("stage", "outer"), [(0, 0), (1, 0), (2, 2), (3, 0), (3, 3)])
def test_a_mesh_of_two_axes(stage: int, outer: int) -> None:
    settings = replace(TINY, stage=stage, outer_stage=outer, mesh="2x2", nproc_per_node=4)
    content = trace_on_ranks(settings)
    assert require_overlap(content, Mesh(2, 2)) > 0
    for span in spans_of(content):
        if span["cat"] in ("gathers", "reductions"):
            assert span["args"]["axis"] in ("inner", "outer")
    threads = {event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"}
    assert {"reductions (inner)", "reductions (outer)"} <= threads


def test_muon_sends_to_owners_and_back() -> None:
    content = trace_on_ranks(replace(TINY, stage=2, optimizer="muon"))
    owners = names(content, "to and from owners")
    assert {name.partition(" ")[0] for name in owners} == {"to", "from"}


def test_recomputed_blocks_are_marked() -> None:
    content = trace_on_ranks(replace(TINY, stage=3, recompute=True))
    assert names(content, "compute")[6:] == [
        *("backward head", "backward norm", "backward blocks.1", "recompute blocks.1"),
        *("backward blocks.0", "recompute blocks.0", "backward positions", "backward tokens"),
    ]
    spans = {span["name"]: span for span in spans_of(content, 0) if span["cat"] == "compute"}
    assert spans["recompute blocks.1"]["args"]["recomputed"] is True
    assert "recomputed" not in spans["forward blocks.1"]["args"]
    assert spans["backward blocks.1"]["dur"] > spans["recompute blocks.1"]["dur"]


def test_states_on_a_disk_visit_in_the_update(tmp_path: Path) -> None:
    content = trace_on_ranks(replace(TINY, stage=2, states=str(tmp_path)))
    (update,) = (span for span in spans_of(content, 0) if span["cat"] == "update")
    assert update["dur"] > 0


def test_one_rank_has_nothing_to_wait_for() -> None:
    content = trace_on_ranks(replace(TINY, stage=3, nproc_per_node=1))
    assert not any(span["args"]["bytes"] for span in spans_of(content) if span["cat"] in IN_FLIGHT)
    assert names(content, "compute")[0] == "forward tokens"


class Adapted(nn.Module):
    """A frozen product and a low-rank one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(48, 48)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(48, 4), nn.Linear(4, 48)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Checkpointed(nn.Module):
    """Blocks under checkpoints by themselves, as libraries make them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 48)
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.head = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        loss: Tensor = self.head(x).square().mean()
        return loss


class Adapting(Trainer):
    """A loop of the test's own, with stages by module."""

    def __init__(self, stage: Any) -> None:
        self.settings, self.accelerator, self.model = TINY, HERE, Checkpointed()
        self.zero = ZeroOptimizer(
            self.model, torch.optim.AdamW, stage=stage, precision="fp32", bucket_mb=0.001
        )
        self.optimizers = [self.zero]

    def step(self, batches: Any, mark: Mark = lambda part: None) -> tuple[list[Tensor], Tensor | None]:
        mark("forward")
        loss = self.model(*batches[0])
        mark("backward")
        loss.backward()
        mark("optimizer")
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
        return [], None


def adapting(stage: Any) -> dict[str, Any] | None:
    torch.manual_seed(0)

    def batches(step: int) -> list[Batch]:
        return [(torch.randn(4, 8),)]

    return trace_step(Adapting(stage), batches)


@pytest.mark.parametrize("stage", [2, 3, {"blocks": 3, "*": 2}])
def test_frozen_weights_stages_by_module_and_checkpoints_of_libraries(stage: Any) -> None:
    content = run_ranks(2, adapting, stage)[0]
    require_form(content, 2)
    require_traffic(content, 2)
    compute = names(content, "compute")
    assert compute[:5] == [
        f"forward {path}" for path in ("first", "blocks.0", "blocks.1", "blocks.2", "head")
    ]
    assert compute[5:] == [
        *("backward head", "backward blocks.2", "recompute blocks.2", "backward blocks.1"),
        *("recompute blocks.1", "backward blocks.0", "recompute blocks.0", "backward first"),
    ]


def on_device(settings: Settings) -> dict[str, Any] | None:
    with device_way(PromptStream):
        return traced(settings)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_way_of_a_device(stage: int) -> None:
    """Collectives are told where their streams run them, and waits are the computation's."""
    content = run_ranks(2, on_device, replace(TINY, stage=stage))[0]
    require_form(content, 2)
    require_traffic(content, 2)
    assert "wait of the device" in names(content, "waits")
