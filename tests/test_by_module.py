"""Settings by module: which key decides, what is refused, and units that never mix settings."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerokit.by_module import of_parameters, settle
from zerokit.errors import UsageError
from zerokit.formulas import Pool, list_held, predict_memory, predict_traffic
from zerokit.layout import Parameter, Segment, build_layout
from zerokit.placement import Mesh, MixedPlacement, Placement, placed
from zerokit.sizes import ElementBytes

MODULES = ["", "backbone", "backbone.0", "backbone.0.norm", "backbone.1", "head"]
SIZES = ElementBytes(compute=2, reduce=4, master=4, states=8, scalars=4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"*": 1}, dict.fromkeys(MODULES, 1)),
        ({"backbone": 3, "*": 1}, dict(zip(MODULES, (1, 3, 3, 3, 3, 1), strict=True))),
        ({"backbone.0": 2, "backbone": 3, "*": 1}, dict(zip(MODULES, (1, 3, 2, 2, 3, 1), strict=True))),
        ({"*": 1, "backbone.0.norm": 0}, dict(zip(MODULES, (1, 1, 1, 0, 1, 1), strict=True))),
        ({"norm": 0, "*": 1}, dict(zip(MODULES, (1, 1, 1, 0, 1, 1), strict=True))),
        ({"norm": 0, "0.norm": 2, "backbone": 1}, dict(zip(MODULES[1:5], (1, 1, 2, 1), strict=True))),
        ({"0.norm": 2, "backbone.0.norm": 3}, {"backbone.0.norm": 3}),
        ({"head": 2}, {"head": 2}),
        ({}, {}),
        (len, {path: len(path) for path in MODULES}),
    ],
)
def test_the_key_of_the_innermost_module_decides(given: Any, expected: dict[str, int]) -> None:
    assert settle("stage", given, MODULES) == expected


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("backbon", "'backbon' is no module of the model, but 'backbone'"),
        ("back", "'back' is no module"),
        ("orm", "'orm' is no module"),
        ("head.weight", "but 'head'"),
        ("backbone.", "'backbone.' is no module"),
        ("", "'' is no module"),
        (3, "3 is no module"),
    ],
)
def test_a_key_that_is_no_module_is_refused(key: Any, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        settle("stage", {key: 3, "*": 2}, MODULES)


def test_parameters_have_the_setting_of_their_module() -> None:
    tied = Parameter("backbone.0.weight", (2,), aliases=("head.weight",))
    assert of_parameters("stage", settle("stage", {"*": 2}, MODULES), [tied]) == {"backbone.0.weight": 2}
    with pytest.raises(
        UsageError, match=r"backbone\.0\.weight and head\.weight are one parameter, but have 3 and 2"
    ):
        of_parameters("stage", settle("stage", {"head": 2, "*": 3}, MODULES), [tied])
    with pytest.raises(UsageError, match=r"no key covers head\.weight: add '\*' for the rest"):
        of_parameters("stage", settle("stage", {"backbone": 2}, MODULES), [tied])


# ---- generated


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Segment], dict[str, int]]:
    """Segments of any parameters, and a stage for each parameter."""
    segments, number = [], 0
    for place in range(draw(st.integers(1, 6))):
        members = []
        for _ in range(draw(st.integers(1, 4))):
            trainable, shape = draw(st.booleans()), (draw(st.integers(0, 300)),)
            members.append(Parameter(f"p{number}", shape, trainable=trainable))
            number += 1
        segments.append(Segment(draw(st.sampled_from([None, f"m{place}"])), tuple(members)))
    return segments, {f"p{at}": draw(st.integers(0, 3)) for at in range(number)}


@given(models(), st.integers(1, 4), st.integers(0, 3000))
def test_units_are_of_one_stage_and_add_up(
    model: tuple[list[Segment], dict[str, int]], world: int, size: int
) -> None:
    """What ranks hold and what crosses is the sum over units of what a run at each unit's stage has of it."""
    segments, stages = model
    layout = build_layout(segments, world=world, bucket_bytes=size, settings=stages)
    assert {p.name for p in layout.parameters} == stages.keys()
    of_units = [stages[unit.parameters[0].name] for unit in layout.units]
    for unit, stage in zip(layout.units, of_units, strict=True):
        assert {stages[parameter.name] for parameter in unit.parameters} == {stage}
        assert len({parameter.trainable for parameter in unit.parameters}) == 1
    mesh = Mesh(1, world)
    placement = placed(of_units, mesh)
    assert isinstance(placement, MixedPlacement) == (len(set(of_units)) > 1)
    assert placement.cuts_parameters == (3 in of_units)
    held = list(list_held(layout, rank=0, placement=placement, sizes=SIZES))
    alone = {stage: Placement.of(stage, mesh) for stage in range(4)}
    apart = [list(list_held(layout, rank=0, placement=one, sizes=SIZES)) for one in alone.values()]
    assert held == [one for at, stage in enumerate(of_units) for one in apart[stage] if one.unit == at]
    # Buckets are of units that cut gradients alone, and as many as the stage with the most has.
    pool = Pool.of(layout, placement)
    cut = [u for u, stage in zip(layout.units, of_units, strict=True) if u.trainable and stage > 1]
    assert pool.numel == max((u.numel for u in cut if 4 * u.payload_numel <= size), default=0)
    assert pool.most == max((alone[of_units[u.index]].pooled_buckets for u in cut), default=0)
    report = predict_memory(layout, rank=0, placement=placement, sizes=SIZES)
    assert report.buckets == pool.buckets * pool.numel * SIZES.reduce
    moved = predict_traffic(layout, placement=placement, sizes=SIZES)
    trained = sum(unit.payload_numel for unit in layout.units if unit.trainable)
    reduced = moved.by_operation.get("reduce_scatter")
    assert (reduced.elements if reduced else 0) == (world - 1) * trained
    gathered = moved.by_operation.get("all_gather")
    least = [u.payload_numel for u, s in zip(layout.units, of_units, strict=True) if u.trainable or s == 3]
    assert (gathered.elements if gathered else 0) >= (world - 1) * sum(least)


@given(models(), st.integers(1, 3), st.integers(0, 3000))
def test_equal_settings_change_no_layout(
    model: tuple[list[Segment], dict[str, int]], world: int, size: int
) -> None:
    segments, stages = model
    plain = build_layout(segments, world=world, bucket_bytes=size)
    assert build_layout(segments, world=world, bucket_bytes=size, settings=dict.fromkeys(stages, 2)) == plain
