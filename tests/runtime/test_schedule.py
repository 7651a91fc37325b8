"""What a rank issues, in which order, and what it holds meanwhile: one line for each way through a model.

"g" is a gather and "r" a reduction of a unit; "f" and "b" are forward and backward inside a block. All of it runs in
one process on a fake group, by the optimizer's public interface.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zerokit
from tests.support.distributed import run_alone
from tests.support.schedules import Training, recorded

Told = list[str]


def second_step(stage: int, blocks: int = 4, **options: object) -> Told:
    """Returns the order of the second step, and the most units in memory."""
    training = Training(stage, blocks, **options)  # type: ignore[arg-type]
    training.step()
    training.told()
    training.step()
    most = max(training.resident)
    return [training.told(), f"{most} in memory"]


def first_step() -> Told:
    training = Training(3)
    training.step()
    return [training.told()]


def uses(first: list[int], *later: list[int], blocks: int = 4) -> Told:
    """What is issued in the steps after the first one."""
    training = Training(3, blocks)
    training.step(first)
    told = []
    for each in later:
        training.told()
        training.step(each)
        most = max(training.resident)
        told += [training.told(), f"{most} in memory"]
    return told


def own_order(stage: int) -> Told:
    training = Training(stage, 3)
    for _ in range(2):
        training.told()
        training.step([2, 0, 1])
    return [training.told("grs")]


def recomputed() -> Told:
    training = Training(3, 3)
    training.model.recomputed = True
    training.step()
    training.told()
    training.step()
    return [training.told()]


def evaluated() -> Told:
    training = Training(3, 3)
    training.step()
    training.told()
    with torch.no_grad():
        training.forward()
    held = training.units_in_memory()
    return [training.told(), f"{held} in memory"]


def accumulated(stage: int) -> Told:
    """Two micro-batches, then a step."""
    training = Training(stage, 3)
    training.step()
    training.told()
    with training.optimizer.accumulate():
        training.optimizer.backward(training.forward())
    first = training.told("gr")
    training.optimizer.backward(training.forward())
    training.update()
    return [first, training.told("grs")]


def shown() -> Told:
    """A step inside `gathered()`."""
    training = Training(3, 3)
    training.step()
    training.told()
    with training.optimizer.gathered():
        opened = training.told()
        with training.optimizer.gathered():
            training.step()
        held = training.units_in_memory()
    return [opened, training.told("grs"), f"{held} in memory", f"{training.units_in_memory()} after it"]


def aside() -> Told:
    """Blocks called by themselves."""
    training = Training(3, 3)
    training.step()
    training.told()
    for index in (1, 2):
        training.model.blocks[index](training.x)
    return [training.told(), f"{training.units_in_memory()} in memory"]


def gradients_of_inputs() -> Told:
    training = Training(3, 3)
    training.step()
    training.told()
    torch.autograd.grad(training.forward(), training.x)
    return [training.told(), f"{training.units_in_memory()} in memory"]


def read_outside() -> Told:
    """Reading one weight after a step waits for its unit and issues nothing; at stage 3 it is refused."""
    told = []
    for stage in (1, 2, 3):
        training = Training(stage, 3)
        training.step()
        training.told()
        try:
            training.model.blocks[1].weight.sum()  # type: ignore[operator]
        except zerokit.UsageError as error:
            told.append(f"{type(error).__name__}{' gathered()' if 'gathered()' in str(error) else ''}")
        told.append(training.told())
    return told


STAGES_1_AND_2 = "f0 f1 f2 f3 b3 r3 b2 r2 b1 r1 b0 r0 step g0 g1 g2 g3"

SCENES: dict[str, tuple[Callable[[], Told], Told]] = {
    "stage 0 gathers sums behind the reductions": (
        lambda: second_step(0),
        ["f0 f1 f2 f3 b3 r3 b2 r2 b1 r1 b0 g3 r0 g2 g1 g0 step", "0 in memory"],
    ),
    "stage 1 gathers what was updated, at once": (lambda: second_step(1), [STAGES_1_AND_2, "0 in memory"]),
    "stage 2 does the same": (lambda: second_step(2), [STAGES_1_AND_2, "0 in memory"]),
    "stage 1 gathers in the order of forward": (
        lambda: own_order(1),
        ["r1 r0 r2 step g2 g0 g1"],
    ),
    "stage 2 gathers in the order of forward": (
        lambda: own_order(2),
        ["r1 r0 r2 step g2 g0 g1"],
    ),
    "the first step at stage 3: line order, then its reverse": (
        first_step,
        ["g0 g1 f0 g2 f1 g3 f2 f3 g3 g2 b3 r3 g1 b2 r2 g0 b1 r1 b0 r0 step"],
    ),
    "the second step: the last unit stays for backward": (
        lambda: second_step(3),
        ["g0 g1 f0 g2 f1 g3 f2 f3 g2 b3 r3 g1 b2 r2 g0 b1 r1 b0 r0 step", "2 in memory"],
    ),
    "prefetch=0": (
        lambda: second_step(3, prefetch=0),
        ["g0 f0 g1 f1 g2 f2 g3 f3 b3 r3 g2 b2 r2 g1 b1 r1 g0 b0 r0 step", "1 in memory"],
    ),
    "prefetch=2": (
        lambda: second_step(3, prefetch=2),
        ["g0 g1 g2 f0 g3 f1 f2 f3 g2 g1 b3 r3 g0 b2 r2 b1 r1 b0 r0 step", "3 in memory"],
    ),
    "units left out": (
        lambda: uses([0, 1, 2, 3], [2]),
        ["g0 g1 g2 g3 f2 g2 r3 g1 b2 r2 g0 r1 r0 step", "2 in memory"],
    ),
    "many units left out are not held together": (
        lambda: uses([0, 1, 2, 3, 4, 5], [4], [0], blocks=6),
        [
            "g0 g1 g2 g3 g4 g5 f4 g4 r5 g3 b4 r4 g2 r3 g1 r2 g0 r1 r0 step",
            "2 in memory",
            "g0 g1 f0 g2 g3 g4 g5 g4 r5 g3 r4 g2 r3 g1 r2 g0 b0 r1 r0 step",
            "2 in memory",
        ],
    ),
    "a unit used twice is gathered twice": (
        lambda: uses([0, 1, 0, 2], [0, 1, 0, 2], blocks=3),
        ["g0 g1 f0 g0 f1 g2 f0 f2 g0 b2 r2 g1 b0 g0 b1 r1 b0 r0 step", "2 in memory"],
    ),
    "another order is gathered as it comes, and recorded": (
        lambda: uses([0, 1, 2], [0, 1, 0, 1, 2], [0, 1, 0, 1, 2], blocks=3),
        [
            "g0 g1 f0 g2 f1 g0 f0 g1 f1 g2 f2 g2 g1 b2 r2 g0 b1 g1 b0 g0 b1 r1 b0 r0 step",
            "2 in memory",
            "g0 g1 f0 g0 f1 g1 f0 g2 f1 f2 g1 b2 r2 g0 b1 g1 b0 g0 b1 r1 b0 r0 step",
            "2 in memory",
        ],
    ),
    "a unit that is still there is used again": (
        lambda: uses([0, 1, 2], [0, 0, 1, 2], blocks=3),
        ["g0 g1 f0 f0 g2 f1 f2 g1 b2 r2 g0 b1 r1 b0 b0 r0 step", "2 in memory"],
    ),
    "the root's own parameters are gathered first and reduced last": (
        lambda: second_step(3, 3, scaled=True),
        ["g0 g1 g2 f0 g3 f1 f2 g2 b2 r3 g1 b1 r2 b0 r1 r0 step", "3 in memory"],
    ),
    "a frozen unit is gathered and not reduced": (
        lambda: second_step(3, frozen=[1]),
        ["g0 g1 f0 g2 f1 g3 f2 f3 g2 b3 r3 g1 b2 r2 g0 b1 b0 r0 step", "2 in memory"],
    ),
    "recomputation gathers nothing": (
        recomputed,
        ["g0 g1 f0 g2 f1 f2 g1 b2 f2 r2 g0 b1 f1 r1 b0 f0 r0 step"],
    ),
    "an evaluation leaves nothing": (evaluated, ["g0 g1 f0 g2 f1 f2", "0 in memory"]),
    "accumulate() at stage 0": (lambda: accumulated(0), ["", "r2 r1 r0 g2 g1 g0 step"]),
    "accumulate() at stage 1": (lambda: accumulated(1), ["", "r2 r1 r0 step g0 g1 g2"]),
    "accumulate() at stage 2": (lambda: accumulated(2), ["", "r2 r1 r0 step g0 g1 g2"]),
    "accumulate() at stage 3": (
        lambda: accumulated(3),
        ["g0 g1 g2 g1 g0", "g0 g1 g2 g1 r2 g0 r1 r0 step"],
    ),
    "inside gathered()": (
        shown,
        ["g0 g1 g2", "r2 r1 r0 step g0 g1 g2", "3 in memory", "0 after it"],
    ),
    "blocks called by themselves": (aside, ["g1 f1 g2 f2", "1 in memory"]),
    "gradients of inputs": (
        gradients_of_inputs,
        ["g0 g1 f0 g2 f1 f2 g1 b2 g0 b1 b0", "0 in memory"],
    ),
    "a weight read after a step": (read_outside, ["", "", "UsageError gathered()", ""]),
}


def _tell_all() -> dict[str, Told]:
    with recorded():
        return {name: scene() for name, (scene, _) in SCENES.items()}


@pytest.fixture(scope="module")
def told() -> dict[str, Told]:
    found: dict[str, Told] = run_alone(_tell_all)
    return found


@pytest.mark.parametrize("name", SCENES)
def test_schedule(name: str, told: dict[str, Told]) -> None:
    assert told[name] == SCENES[name][1]


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
    """Each rank uses its own part of what all have used in their first step."""
    count, frozen, order, scaled = line
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
            training.optimizer.backward(training.forward(uses))
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
