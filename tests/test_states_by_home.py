"""Memory by home: where masters and states are between steps, what visits, and what is in fp8."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from zerokit.formulas import MemoryReport, predict_memory, visits
from zerokit.layout import Layout, Parameter, Segment, build_layout
from zerokit.owners import Owners
from zerokit.placement import Mesh, Placement
from zerokit.sizes import ElementBytes, StateBytes, Wholes

SIZES = ElementBytes(compute=2, reduce=4, master=4, states=8, scalars=4)
FP8 = replace(SIZES, home="fp8", moments=(4, 4))


def layout_of(*numels: int, world: int = 1, trainable: bool = True) -> Layout:
    """A unit for each number of elements."""
    segments = [
        Segment(f"blocks.{at}", (Parameter(f"blocks.{at}.w", (numel,), trainable=trainable),))
        for at, numel in enumerate(numels)
    ]
    return build_layout(segments, world=world, bucket_bytes=1)


def report(layout: Layout, sizes: ElementBytes, *, stage: int = 2, rank: int = 0) -> MemoryReport:
    placement = Placement.of(stage, Mesh(1, layout.world))
    return predict_memory(layout, rank=rank, placement=placement, sizes=sizes)


def away_of(held: MemoryReport) -> tuple[int, int, int, int, int]:
    return held.optimizer, held.host, held.disk, held.visiting, held.padding


def test_masters_and_states_are_in_the_line_of_their_home() -> None:
    layout = layout_of(100, 300)  # 28 and 20 elements of padding behind them
    before = report(layout, SIZES)
    assert away_of(before) == (400 * 12, 0, 0, 0, 48 * (2 + 4 + 12))
    host = report(layout, replace(SIZES, home="host"))
    # Padding is where the rest is.
    assert away_of(host) == (0, 448 * 12, 0, 2 * 320 * 12, 48 * (2 + 4))
    assert away_of(report(layout, replace(SIZES, home="disk"))) == (
        0,
        0,
        *away_of(host)[1:2],
        *away_of(host)[3:],
    )
    # Elsewhere is not the device.
    assert host.total == before.total - 448 * 12
    assert host.scalars == before.scalars == 2 * 4


def test_masters_that_are_the_parameters_stay() -> None:
    in_place = replace(SIZES, compute=4, master=0, home="host")
    held = report(layout_of(100, 300), in_place)
    assert (held.parameters, held.optimizer, held.host) == (400 * 4, 0, 448 * 8)
    assert held.visiting == 2 * 320 * 8


@pytest.mark.parametrize(("numels", "buffers"), [((), 0), ((300,), 1), ((300, 100, 300), 2)])
def test_there_are_two_buffers_at_most(numels: tuple[int, ...], buffers: int) -> None:
    assert report(layout_of(*numels), replace(SIZES, home="disk")).visiting == buffers * 320 * 12


def test_frozen_parameters_visit_nothing() -> None:
    held = report(layout_of(300, trainable=False), replace(SIZES, home="disk"))
    assert (held.disk, held.visiting) == (0, 0)


def test_moments_in_fp8_take_a_byte_and_a_sixteenth() -> None:
    held = report(layout_of(100, 300), FP8)
    # Two moments: a code for each element, and a scale of four bytes for each 64, of 128 and 320 elements.
    assert held.optimizer == 400 * (4 + 2) + 2 * 4 * (2 + 5)
    assert held.visiting == 320 * 8  # decoded one unit at a time
    assert (held.host, held.disk) == (0, 0)
    # Issue: 8 bytes of moments become 2.125.
    even = report(layout_of(64 * 100), FP8)
    assert even.optimizer == 6400 * (4 + 2.125)


def test_states_that_are_no_moments_keep_their_bytes_beside_fp8() -> None:
    """An average of weights is a state too: 12 bytes, of which 8 are moments."""
    held = report(layout_of(640), replace(FP8, states=12))
    assert held.optimizer == 640 * (4 + 4 + 2) + 2 * 4 * 10


def test_groups_have_their_own_states() -> None:
    segments = [Segment(f"blocks.{at}", (Parameter(f"blocks.{at}.w", (64,), group=at),)) for at in range(2)]
    layout = build_layout(segments, world=1, bucket_bytes=1)
    sizes = replace(FP8, groups={1: StateBytes(4, 0, (4,))})
    assert report(layout, sizes).optimizer == 64 * (4 + 2) + 2 * 4 + 64 * (4 + 1) + 4


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_step_brings_the_share_of_each_rank(stage: int, home: str) -> None:
    """(s+4)Ψ/N bytes come, and as many leave."""
    layout = layout_of(4096, 8192, world=4)
    placement = Placement.of(stage, Mesh(1, 4))
    share = 1 if stage == 0 else 4
    sizes = replace(SIZES, home=home)
    for rank in range(4):
        moved = visits(layout, rank=rank, placement=placement, sizes=sizes)
        assert moved == {0: 12 * 4096 / share, 1: 12 * 8192 / share}
    stays = visits(layout, rank=0, placement=placement, sizes=SIZES)
    assert set(stays.values()) == {0}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("rank", range(3))
def test_only_the_line_changes(stage: int, rank: int) -> None:
    layout = layout_of(1000, 77, 3000, world=3)
    device = report(layout, SIZES, stage=stage, rank=rank)
    host = report(layout, replace(SIZES, home="host"), stage=stage, rank=rank)
    padding = device.padding - host.padding
    assert host.host == device.optimizer + padding
    assert replace(host, host=0, optimizer=device.optimizer, visiting=0, padding=device.padding) == device
    assert device.total - host.total == host.host


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_tensors_visit_their_owner(stage: int) -> None:
    """A matrix of 10 x 13 with a momentum in fp32; at stage 3 also where its dtype is that of the computation."""
    segments = [Segment("blocks.0", (Parameter("blocks.0.w", (10, 13)),))]
    layout = build_layout(segments, world=1, bucket_bytes=1)
    placement = Placement.of(stage, Mesh(1, 1))
    owners = Owners(layout, placement, [0])

    def sizes(home: str, compute: int, master: int) -> ElementBytes:
        moments = (4,) if home == "fp8" else ()
        wholes = Wholes(
            owners, lambda group, shape: (4 * math.prod(shape) + 4, 4), lambda group, shape: moments
        )
        return ElementBytes(compute, 4, master, 0, wholes=wholes, home=home)

    half = predict_memory(layout, rank=0, placement=placement, sizes=sizes("host", 2, 4))
    assert (half.host, half.optimizer, half.scalars, half.visiting) == (130 * 8, 0, 4, 130 * 8)
    single = predict_memory(layout, rank=0, placement=placement, sizes=sizes("disk", 4, 0))
    separate = 130 * 4 * (stage == 3)
    assert (single.disk, single.visiting) == (130 * 4 + separate, 130 * 4 + separate)
    eight = predict_memory(layout, rank=0, placement=placement, sizes=sizes("fp8", 2, 4))
    assert (eight.optimizer, eight.visiting) == (130 * 4 + 130 + 3 * 4, 130 * 4)
