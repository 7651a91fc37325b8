"""The time of a step: closed forms in the limits, and what more bandwidth, ranks and micro-batches do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerokit.layout import Layout, Parameter, Segment, build_layout
from zerokit.placement import Axis, Mesh, Placement
from zerokit.planning.efficiency import Efficiency
from zerokit.planning.hardware import Cluster, Device, Link
from zerokit.planning.timeline import Plan, step_time, update_bytes
from zerokit.planning.work import ModelWork, Product, UnitWork, Work
from zerokit.sizes import ElementBytes

SIZES = ElementBytes(compute=2, reduce=4, master=4, states=8)
FAST = Efficiency(100e12, (50e12, 40e12), 1e12, 2)
BLOCK = Work((Product(4096, 1024, 1024),), 10_000_000, 5)


def layout_of(blocks: int, numel: int, world: int) -> Layout:
    segments = [
        Segment(None, (Parameter("embedding", (numel,)),)),
        *(Segment(f"blocks.{at}", (Parameter(f"blocks.{at}.weight", (numel,)),)) for at in range(blocks)),
    ]
    return build_layout(segments, world=world, bucket_bytes=2**20)


def work_of(blocks: int) -> ModelWork:
    return ModelWork(tuple(UnitWork(at, BLOCK, BLOCK) for at in range(blocks + 1)), 4096)


def plan_of(stage: object, mesh: Mesh, blocks: int = 4, numel: int = 1_048_576, **options: Any) -> Plan:
    layout = layout_of(blocks, numel, mesh.world)
    return Plan(work_of(blocks), layout, Placement.of(stage, mesh), SIZES, **options)


def cluster_of(
    inner: float, outer: float | None = None, *, per_node: int = 8, relays: bool = True
) -> Cluster:
    far = None if outer is None else Link(0.0, outer, relays=relays)
    return Cluster(Device("test"), per_node, Link(0.0, inner, relays=relays), far)


def test_one_rank_computes_and_updates() -> None:
    plan = plan_of(3, Mesh(1, 1))
    step = step_time(plan, Cluster(Device("test"), 1), FAST)
    moved = sum(unit.numel for unit in plan.layout.units) * (SIZES.compute + SIZES.reduce)
    passes = 10 * FAST.seconds(BLOCK) + moved / FAST.memory_bytes_per_s
    update = sum(unit.numel for unit in plan.layout.units) * update_bytes(SIZES) / FAST.memory_bytes_per_s
    assert step.compute_s == pytest.approx(passes)
    assert step.optimizer_s == pytest.approx(update)
    assert step.total_s == pytest.approx(passes + update)
    assert step.exposed_total_s == 0


@pytest.mark.parametrize(("stage", "gathered_bytes"), [(0, 4), (1, 2), (2, 2), (3, 4)])
def test_on_a_slow_link_the_step_is_its_bytes(stage: int, gathered_bytes: int) -> None:
    plan = plan_of(stage, Mesh(1, 4), blocks=40)
    step = step_time(plan, cluster_of(1e6), FAST)
    total = sum(unit.numel for unit in plan.layout.units)
    expected = total * (4 + gathered_bytes) * 3 / 4 / 1e6
    # Stage 3 keeps one unit of forty, and the rest, from forward to backward.
    assert step.total_s == pytest.approx(expected, rel=0.05)
    assert step.limit == "inner"


def test_hosts_between_nodes_receive_once_a_rank() -> None:
    """Rings bring a byte to a node once, messages between hosts once for each rank of it."""
    plan = plan_of(2, Mesh(1, 4), blocks=20)
    ring = step_time(plan, cluster_of(1e12, 1e6, per_node=2), FAST).total_s
    hosts = step_time(plan, cluster_of(1e12, 1e6, per_node=2, relays=False), FAST).total_s
    received = sum(unit.numel for unit in plan.layout.units) * (4 + 2)
    assert ring == pytest.approx(received * 3 / 4 / 1e6, rel=0.05)
    assert hosts == pytest.approx(received * 2 / 4 * 2 / 1e6, rel=0.05)


def test_a_mesh_sends_an_inner_piece_between_nodes() -> None:
    plan = plan_of((0, 3), Mesh(2, 4), blocks=20)
    step = step_time(plan, cluster_of(1e12, 1e6, per_node=4), FAST)
    total = sum(unit.numel for unit in plan.layout.units)
    # Each of four inner pieces is reduced and gathered by two nodes at once; all of them share the nodes' link.
    assert step.total_s == pytest.approx(total * (4 + 4) / 2 / 1e6, rel=0.05)
    assert step.limit == "outer"


@settings(max_examples=60, deadline=None)
@given(
    stage=st.sampled_from([0, 1, 2, 3, (0, 3), (1, 3), (2, 2)]),
    bandwidth=st.floats(1e6, 1e12),
    more=st.floats(1.01, 1000),
    micro_batches=st.integers(1, 9),
    reduces=st.booleans(),
)
def test_more_bandwidth_is_never_slower(
    stage: object, bandwidth: float, more: float, micro_batches: int, *, reduces: bool
) -> None:
    plan = plan_of(stage, Mesh(2, 4), micro_batches=micro_batches, reductions=micro_batches if reduces else 1)
    slow, fast = (
        step_time(plan, cluster_of(10 * speed, speed, per_node=4), FAST)
        for speed in (bandwidth, bandwidth * more)
    )
    assert fast.total_s <= slow.total_s * (1 + 1e-9)
    for step in (slow, fast):
        parts = step.compute_s + step.slowed_s + step.exposed_total_s + step.optimizer_s
        assert step.total_s == pytest.approx(parts)
        assert step.exposed_total_s <= step.total_s


@given(micro_batches=st.integers(1, 40))
def test_every_micro_batch_of_a_free_link_costs_the_same(micro_batches: int) -> None:
    one, many = (
        step_time(plan_of(2, Mesh(1, 4), micro_batches=count, reductions=count), cluster_of(1e18), FAST)
        for count in (1, micro_batches)
    )
    passes = one.total_s - one.optimizer_s
    assert many.total_s - many.optimizer_s == pytest.approx(micro_batches * passes, rel=1e-3)


def test_a_transfer_in_flight_slows_work_down() -> None:
    links = Link(0.0, 1e9), Link(0.0, 1e9, share=0.5)
    free, slowed = (
        step_time(plan_of(2, Mesh(1, 8)), Cluster(Device("test"), 8, link), FAST) for link in links
    )
    assert free.slowed_s == pytest.approx(0, abs=1e-12)
    assert slowed.slowed_s > 0


def test_the_cost_depends_on_units_and_not_on_ranks_or_micro_batches() -> None:
    few, many = (
        step_time(
            plan_of(3, Mesh(1, ranks), micro_batches=count, reductions=count), cluster_of(3e11, 4e11), FAST
        )
        for ranks, count in ((64, 3), (16384, 300))
    )
    assert len(many.events) <= len(few.events)
    assert many.exposed_s[Axis.INNER] > 0
