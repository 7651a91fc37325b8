"""Plans of optimizers that update whole matrices: states and time of the owner with most, and what moves there and
back."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.cli.inside import zerokit_inside
from zerokit.bench.engines.optimizers import shares_of
from zerokit.bench.plans.ask import plan
from zerokit.bench.plans.subjects import subject_named
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import build
from zerokit.errors import UsageError
from zerokit.layout import Parameter, Segment, build_layout
from zerokit.placement import Mesh, Placement
from zerokit.planning.efficiency import Efficiency
from zerokit.planning.hardware import Cluster, Device, Link
from zerokit.planning.memory import StepMemory, element_sizes, fullest_rank
from zerokit.planning.replay import Step
from zerokit.planning.timeline import Plan, step_time, update_bytes
from zerokit.planning.trace import Traces
from zerokit.planning.work import ModelWork, UnitWork, Work, newton_schulz
from zerokit.runtime import Precision, ZeroOptimizer
from zerokit.sizes import ElementBytes

FAST = Efficiency(100e12, (50e12, 40e12), 1e12, 2)


@pytest.mark.parametrize(("m", "n"), [(64, 64), (1024, 4096), (3, 7)])
def test_flops_of_newton_and_schulz(m: int, n: int) -> None:
    for shape in ((m, n), (n, m)):
        assert sum(p.flops for p in newton_schulz(shape).products) == 5 * (4 * m * m * n + 2 * m**3)


def _plan_of(stage: object, mesh: Mesh) -> Plan:
    """Eight blocks of a matrix of 1024 x 4096 and a bias, and a vector outside."""
    segments = [
        Segment(None, (Parameter("scale", (4096,), group=1),)),
        *(
            Segment(
                f"blocks.{at}",
                (Parameter(f"blocks.{at}.w", (1024, 4096)), Parameter(f"blocks.{at}.b", (4096,), group=1)),
            )
            for at in range(8)
        ),
    ]
    layout = build_layout(segments, world=mesh.world, bucket_bytes=1 << 20)
    placement = Placement.of(stage, mesh)
    sizes = element_sizes(Precision.of("bf16"), "muon", layout, placement)
    work = ModelWork(tuple(UnitWork(unit.index, Work()) for unit in layout.units), 1)
    return Plan(work, layout, placement, sizes)


def _cluster(bytes_per_s: float) -> Cluster:
    return Cluster(Device("test"), 8, Link(0.0, bytes_per_s))


@pytest.mark.parametrize(("stage", "ranks", "owned"), [(0, 8, 8), (1, 1, 8), (2, 4, 2), (3, 8, 1), (2, 3, 3)])
def test_the_update_takes_the_time_of_the_rank_that_owns_most(stage: int, ranks: int, owned: int) -> None:
    step = _plan_of(stage, Mesh(1, ranks))
    own = replace(step.sizes, states=4)
    matrix = FAST.seconds(newton_schulz((1024, 4096), 1024 * 4096 * update_bytes(own)))
    vectors = 9 * 4096 * update_bytes(step.sizes) / FAST.memory_bytes_per_s
    time = step_time(step, _cluster(1e18), FAST)
    assert owned * matrix <= time.optimizer_s <= owned * matrix + vectors
    assert time.total_s == pytest.approx(
        time.compute_s + time.slowed_s + time.exposed_total_s + time.optimizer_s
    )


def test_what_moves_to_owners_and_back_takes_the_links_time() -> None:
    """All of a matrix but what its owner has; slow links show how much."""
    slow = _cluster(1e6)
    whole, element = _plan_of(2, Mesh(1, 4)), ElementBytes(2, 4, 4, 8)
    more = step_time(whole, slow, FAST).total_s - step_time(replace(whole, sizes=element), slow, FAST).total_s
    elements = 8 * 1024 * 4096
    # Summed over ranks; each has its own link.
    assert more == pytest.approx(elements * 3 / 4 * (4 + 2) / 4 / 1e6, rel=0.02)


@pytest.mark.parametrize("home", ["device", "disk", "fp8"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3, (0, 3), (1, 3)])
def test_states_of_many_ranks_are_those_of_their_optimizer(stage: Any, home: str, tmp_path: Path) -> None:
    mesh = Mesh(8, 8) if isinstance(stage, tuple) else Mesh(1, 64)
    traces = Traces(subject_named("gpt-tiny"), on_cuda=False, exactly=True, optimizer="muon")
    trace = traces.get(1, "bf16", recompute=False)
    layout, placement = trace.layout.for_world(64), Placement.of(stage, mesh)
    sizes = element_sizes(Precision.of("bf16"), "muon", layout, placement, home)
    step = Step(layout, placement, sizes, on_cuda=False)
    planned = StepMemory(trace, step).of(trace)
    rank = fullest_rank(step)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64)
    try:
        model = build("gpt-tiny")
        shares = shares_of(model, Settings(model="gpt-tiny", optimizer="muon"))
        classes: dict[Any, Any] = {partial(share.optimizer_class): share.parameters for share in shares}
        options: dict[str, Any] = {"states": tmp_path if home == "disk" else home}
        if mesh.outer > 1:
            options["mesh"] = (8, 8)
        optimizer = ZeroOptimizer(model, classes, stage=stage, precision="bf16", **options)
        assert layout.digest() == optimizer.layout.digest()
        assert planned.held == optimizer.predicted_memory()
        assert planned.held.exchange > 0
        assert optimizer.update_balance == sizes.wholes.owners.balance  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()


def test_a_plan_on_the_command_line(tmp_path: Path) -> None:
    asked = ("plan", "gpt-tiny", "--device", "h100-80", "--gpus", "8", "--nodes", "1", "--batch-size", "2")
    done = zerokit_inside(tmp_path, *asked, "--optimizer", "muon", "--json", "--page", "plan.html")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["bench"].endswith("--precision bf16 --optimizer muon")
    assert "{torch.optim.Muon: matrices, torch.optim.AdamW: rest}" in answer["optimizer"]
    by_stage = {one["stage"]: one for one in answer["fitting"]}
    assert by_stage[0]["exchanged_bytes"] == 0 < by_stage[2]["exchanged_bytes"]
    assert by_stage[0]["update_balance"] == 1 <= by_stage[2]["update_balance"]
    adamw = zerokit_inside(tmp_path, *asked, "--json")
    plain = {one["stage"]: one for one in json.loads(adamw.stdout)["fitting"]}
    assert plain[2]["update_balance"] is None
    assert plain[0]["memory"]["held_bytes"]["optimizer"] > by_stage[0]["memory"]["held_bytes"]["optimizer"]
    table = zerokit_inside(tmp_path, *asked, "--optimizer", "muon").stdout
    assert "update ms" in table
    assert "Each matrix is updated by the rank that owns it. The busiest rank computes " in table
    assert "Assumed: Muon for the matrices of the blocks, AdamW for the rest" in table
    assert "Each matrix is updated by the rank that owns it" in (tmp_path / "plan.html").read_text()


def test_what_muon_cannot_be_planned_for() -> None:
    with pytest.raises(UsageError, match="no matrices that Muon could train"):
        plan("mlp-mnist", gpus=2, device="h100-80", optimizer="muon")
    with pytest.raises(UsageError, match="optimizer 'sgd': expected one of adamw, muon"):
        plan("gpt-tiny", gpus=2, device="h100-80", optimizer="sgd")
