"""What a rank issues, in which order, and what it holds meanwhile: one line for each way through a model.

"g" is a gather and "r" a reduction of a unit; "f" and "b" are forward and backward inside a block. All of it runs in
one process on a fake group, by the optimizer's public interface.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.distributed import run_alone
from tests.support.schedules import Training, recorded
from zerokit.errors import UsageError

Way = Callable[[Training], list[str]]
"""What is done with a model that has made a step, and what was told of it."""


def steps(*uses: Sequence[int] | None) -> Way:
    """Further steps, of these blocks each: what is issued, and the most units in memory."""

    def way(training: Training) -> list[str]:
        told = []
        for each in uses or (None,):
            training.step(each)
            most = max(training.resident)
            told += [training.told(), f"{most} in memory"]
        return told

    return way


def collectives(training: Training) -> list[str]:
    training.step([2, 0, 1])
    return [training.told("grs")]


def recomputed(training: Training) -> list[str]:
    training.model.recomputed = True
    training.step()
    return [training.told()]


def evaluated(training: Training) -> list[str]:
    with torch.no_grad():
        training.forward()
    return [training.told(), f"{training.units_in_memory()} in memory"]


def accumulated(training: Training) -> list[str]:
    """Two micro-batches, then a step."""
    with training.optimizer.accumulate():
        training.optimizer.backward(training.forward())
    first = training.told("gr")
    training.step()
    return [first, training.told("grs")]


def shown(training: Training) -> list[str]:
    """A step inside `gathered()`."""
    with training.optimizer.gathered():
        opened = training.told()
        with training.optimizer.gathered():
            training.step()
        held = training.units_in_memory()
    return [opened, training.told("grs"), f"{held} in memory", f"{training.units_in_memory()} after it"]


def aside(training: Training) -> list[str]:
    """Blocks called by themselves."""
    for index in (1, 2):
        training.model.blocks[index](training.x)
    return [training.told(), f"{training.units_in_memory()} in memory"]


def gradients_of_inputs(training: Training) -> list[str]:
    torch.autograd.grad(training.forward(), training.x)
    return [training.told(), f"{training.units_in_memory()} in memory"]


def read_outside(training: Training) -> list[str]:
    """Reading one weight after a step waits for its unit and issues nothing; at stage 3 it is refused."""
    refused = pytest.raises(UsageError, match=r"gathered\(\)")
    with refused if training.optimizer.stage == 3 else contextlib.nullcontext():
        training.model.blocks[1].weight.sum()  # type: ignore[operator]
    return [training.told()]


STAGES_1_AND_2 = "f0 f1 f2 f3 b3 r3 b2 r2 b1 r1 b0 r0 step g0 g1 g2 g3"
SCENES: dict[str, tuple[dict[str, Any], Way, list[str]]] = {
    "stage 0 gathers sums as a part of the reductions": (
        {"stage": 0},
        steps(),
        ["f0 f1 f2 f3 b3 r3 b2 r2 b1 r1 b0 r0 step", "0 in memory"],
    ),
    "stage 1 gathers what was updated, at once": ({"stage": 1}, steps(), [STAGES_1_AND_2, "0 in memory"]),
    "stage 2 does the same": ({"stage": 2}, steps(), [STAGES_1_AND_2, "0 in memory"]),
    "stage 1 in the order of forward": (
        {"stage": 1, "uses": [2, 0, 1]},
        collectives,
        ["r1 r0 r2 step g2 g0 g1"],
    ),
    "the second step at stage 3: the last unit stays for backward": (
        {},
        steps(),
        ["g0 g1 f0 g2 f1 g3 f2 f3 g2 b3 r3 g1 b2 r2 g0 b1 r1 b0 r0 step", "2 in memory"],
    ),
    "prefetch=0": (
        {"prefetch": 0},
        steps(),
        ["g0 f0 g1 f1 g2 f2 g3 f3 b3 r3 g2 b2 r2 g1 b1 r1 g0 b0 r0 step", "1 in memory"],
    ),
    "prefetch=2": (
        {"prefetch": 2},
        steps(),
        ["g0 g1 g2 f0 g3 f1 f2 f3 g2 g1 b3 r3 g0 b2 r2 b1 r1 b0 r0 step", "3 in memory"],
    ),
    "units left out": ({}, steps([2]), ["g0 g1 g2 g3 f2 g2 r3 g1 b2 r2 g0 r1 r0 step", "2 in memory"]),
    "many units left out are not held together": (
        {"blocks": 6},
        steps([4], [0]),
        [
            "g0 g1 g2 g3 g4 g5 f4 g4 r5 g3 b4 r4 g2 r3 g1 r2 g0 r1 r0 step",
            "2 in memory",
            "g0 g1 f0 g2 g3 g4 g5 g4 r5 g3 r4 g2 r3 g1 r2 g0 b0 r1 r0 step",
            "2 in memory",
        ],
    ),
    "a unit used twice is gathered twice": (
        {"blocks": 3, "uses": [0, 1, 0, 2]},
        steps([0, 1, 0, 2]),
        ["g0 g1 f0 g0 f1 g2 f0 f2 g0 b2 r2 g1 b0 g0 b1 r1 b0 r0 step", "2 in memory"],
    ),
    "a unit in use is not gathered ahead for its next use": (
        {"blocks": 3, "uses": [0, 1, 0, 2], "prefetch": 2},
        steps([0, 1, 0, 2]),
        ["g0 g1 f0 g0 g2 f1 f0 f2 g0 g1 b2 r2 b0 g0 b1 r1 b0 r0 step", "3 in memory"],
    ),
    "another order is gathered as it comes, and recorded": (
        {"blocks": 3},
        steps([0, 1, 0, 1, 2], [0, 1, 0, 1, 2]),
        [
            "g0 g1 f0 g2 f1 g0 f0 g1 f1 f2 g2 g1 b2 r2 g0 b1 g1 b0 g0 b1 r1 b0 r0 step",
            "3 in memory",
            "g0 g1 f0 g0 f1 g1 f0 g2 f1 f2 g1 b2 r2 g0 b1 g1 b0 g0 b1 r1 b0 r0 step",
            "2 in memory",
        ],
    ),
    "a unit that is still there is used again": (
        {"blocks": 3},
        steps([0, 0, 1, 2]),
        ["g0 g1 f0 f0 g2 f1 f2 g1 b2 r2 g0 b1 r1 b0 b0 r0 step", "2 in memory"],
    ),
    "the root's own parameters are gathered first and reduced last": (
        {"blocks": 3, "scaled": True},
        steps(),
        ["g0 g1 g2 f0 g3 f1 f2 g2 b2 r3 g1 b1 r2 b0 r1 r0 step", "3 in memory"],
    ),
    "a frozen unit is gathered and not reduced": (
        {"frozen": [1]},
        steps(),
        ["g0 g1 f0 g2 f1 g3 f2 f3 g2 b3 r3 g1 b2 r2 g0 b1 b0 r0 step", "2 in memory"],
    ),
    "a frozen base is freed block by block, with its adapters": (
        {"blocks": 3, "adapted": True},
        steps(),
        ["g0 g1 g2 g3 f0 g4 g5 f1 f2 g2 g3 b2 r5 g0 g1 b1 r3 b0 r1 step", "4 in memory"],
    ),
    "recomputation gathers nothing": (
        {"blocks": 3},
        recomputed,
        ["g0 g1 f0 g2 f1 f2 g1 b2 f2 r2 g0 b1 f1 r1 b0 f0 r0 step"],
    ),
    "an evaluation leaves nothing": ({"blocks": 3}, evaluated, ["g0 g1 f0 g2 f1 f2", "0 in memory"]),
    "accumulate() at stage 0": ({"stage": 0, "blocks": 3}, accumulated, ["", "r2 r1 r0 step"]),
    "accumulate() at stage 1": ({"stage": 1, "blocks": 3}, accumulated, ["", "r2 r1 r0 step g0 g1 g2"]),
    "accumulate() at stage 2": ({"stage": 2, "blocks": 3}, accumulated, ["", "r2 r1 r0 step g0 g1 g2"]),
    "accumulate() at stage 3": (
        {"blocks": 3},
        accumulated,
        ["g0 g1 g2 g1 g0", "g0 g1 g2 g1 r2 g0 r1 r0 step"],
    ),
    "inside gathered()": (
        {"blocks": 3},
        shown,
        ["g0 g1 g2", "r2 r1 r0 step g0 g1 g2", "3 in memory", "0 after it"],
    ),
    "blocks called by themselves": ({"blocks": 3}, aside, ["g1 f1 g2 f2", "1 in memory"]),
    "gradients of inputs": (
        {"blocks": 3},
        gradients_of_inputs,
        ["g0 g1 f0 g2 f1 f2 g1 b2 g0 b1 b0", "0 in memory"],
    ),
    "a weight read after a step at stage 1": ({"stage": 1, "blocks": 3}, read_outside, [""]),
    "a weight read after a step at stage 2": ({"stage": 2, "blocks": 3}, read_outside, [""]),
    "a weight read after a step at stage 3": ({"blocks": 3}, read_outside, [""]),
}
"""By name: how a model is built (at stage 3, of four blocks) and first used, what is done then, what must be told."""
FIRST_STEP = "g0 g1 f0 g2 f1 g3 f2 f3 g3 g2 b3 r3 g1 b2 r2 g0 b1 r1 b0 r0 step"
"""At stage 3: the order of the line, then its reverse."""


def _tell_all() -> dict[str, list[str]]:
    found = {}
    with recorded():
        for name, (options, way, _) in SCENES.items():
            built: dict[str, Any] = {"stage": 3} | options
            uses = built.pop("uses", None)
            training = Training(**({"blocks": len(uses)} if uses else {}) | built)
            training.step(uses)
            first = training.told()
            found[name] = way(training)
            if not options:
                assert first == FIRST_STEP
    return found


def test_schedules() -> None:
    found = run_alone(_tell_all)
    for name, (_, _, expected) in SCENES.items():
        assert found[name] == expected, name


# ---- ranks that use different units


@st.composite
def lines(draw: st.DrawFn) -> tuple[int, list[int], list[int], bool]:
    """(blocks, those that are frozen, the order that all ranks use first, whether the root has parameters)."""
    count = draw(st.integers(1, 5))
    frozen = draw(st.lists(st.integers(0, count - 1), max_size=min(1, count - 1)))
    order = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=7))
    return count, frozen, order, draw(st.booleans())


def subsequences(order: list[int]) -> st.SearchStrategy[list[int]]:
    places = st.sets(st.integers(0, len(order) - 1))
    return places.map(lambda kept: [unit for place, unit in enumerate(order) if place in kept])


@settings(max_examples=60, database=None, deadline=None)
@given(lines(), st.integers(0, 2), st.sampled_from((0, 1, 2, 3)), st.data())
def _issue_the_same(
    line: tuple[int, list[int], list[int], bool], prefetch: int, stage: int, data: st.DataObject
) -> None:
    """Each rank uses its own part of what all have used in their first step, also in a forward beside the trained one.

    That has its backward later, or none.
    """
    count, frozen, order, scaled = line
    kinds = st.sampled_from((None, "open", "dropped"))
    beside = [None, data.draw(kinds, label="beside"), data.draw(kinds, label="beside")]
    if set(order) <= set(frozen) and not scaled:
        order = [*order, next(index for index in range(count) if index not in frozen)]
    issued: list[list[str]] = []
    for rank in range(2):
        training = Training(stage, count, frozen=frozen, scaled=scaled, prefetch=prefetch)
        issued.append([])
        for step in range(3):
            uses = order if step == 0 else data.draw(subsequences(order), label=f"rank {rank} uses")
            if set(uses) <= set(frozen) and not scaled:
                uses = order  # a loss of no parameter starts no backward
            losses = [training.forward(uses)]
            if beside[step]:
                part = data.draw(subsequences(order), label=f"rank {rank} uses beside")
                losses.append(training.forward(order if set(part) <= set(frozen) and not scaled else part))
                if beside[step] == "dropped":
                    losses.pop()
            for loss in losses:
                training.optimizer.backward(loss)
                assert training.units_in_memory() == 0
                issued[-1].append(training.told("gr"))
                reduced = [entry for entry in issued[-1][-1].split() if entry[0] == "r"]
                assert len(set(reduced)) == len(reduced) == count - len(set(frozen)) + scaled
            training.optimizer.zero_grad()
    assert issued[0] == issued[1]


def _generated() -> None:
    with recorded():
        _issue_the_same()


def test_ranks_that_use_different_units_issue_the_same() -> None:
    run_alone(_generated)
