"""Stages 0 to 3 are one computation: the same bits, whatever the units, and the same as without zerokit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.support.distributed import run_alone, run_ranks
from tests.support.models import CASES, FEW
from tests.support.oracle import train_alone
from tests.support.training import LARGE, SMALL, Run, Trajectory, train_all

STAGES = (0, 1, 2, 3)
#: MiB: some neighbours join (1,000 fp32 elements).
MIDDLE = 0.004

NAMES = list(CASES)

MEASURED = Run(clip=math.inf)

#: What is special about these does not depend on how many ranks there are, so they run on one and two only.
VARIANTS = {
    "gpt_groups",
    "gpt_units_by_class",
    "gpt_dropout",
    "gpt_checkpoint_each",
    "gpt_checkpoint_several",
    "batchnorm_mlp",
    "recurrent",
    "dict_output",
    "called_by_method",
    "tied_blocks",
    "tied_inside",
    "two_forwards",
    "unit_unused_on_rank_1",
}


#: The first one records the order of units, the second one is the first to know it; AdamW's states differ in all.
STEPS = {1: 3, 2: 4, 3: 4, 4: 4}

#: Whatever is special about these and about how many ranks there are may meet: they run on three ranks and on four.
#: Others run on three or on four by turns, there at stage 3 and another by turns.
DEEP = {"gpt", "lora", "tiny_parameters", "unused_everywhere", "unit_unused_on_one_rank"}


def worlds_of(name: str) -> list[int]:
    if name in VARIANTS:
        return [1, 2] if name in FEW else [2]
    shallow = [other for other in NAMES if other not in VARIANTS | DEEP]
    more = [3, 4] if name in DEEP else [3 + shallow.index(name) % 2]
    return [*([1] if name in FEW else []), 2, *more]


def runs_of(name: str, world: int) -> dict[str, dict[str, Run]]:
    """Sets of runs that must agree bit for bit, as far as the shorter one goes; `plain` also meets the oracle.

    Other buckets and other loops meet two stages each, stage 3 and another or two by turns; clipping and repeated
    reductions meet all models of `DEEP`, and of the others each a half.
    """
    turn = NAMES.index(name)
    buckets = {s: SMALL if s % 2 else MIDDLE for s in STAGES}
    plain = {
        f"stage {s}": Run(stage=s, clip=math.inf, bucket_mb=buckets[s], steps=STEPS[world])
        for s in (STAGES if name in DEEP or (world == 2 and name not in VARIANTS) else (turn % 3, 3))
    }
    sets = {"plain": plain}
    if world == 2:
        more = [(0, LARGE, False), (3, LARGE, True)], [(2, SMALL, True), (3, MIDDLE, False)]
        for stage, bucket_mb, backward in more[turn % 2]:
            run = Run(stage=stage, clip=math.inf, bucket_mb=bucket_mb, plain_backward=backward, steps=3)
            plain[f"stage {stage}, buckets of {bucket_mb} MiB"] = run
        others = {"accumulated": Run(clip=math.inf, micro=3, accumulate=True, steps=2)}
        if name not in VARIANTS:
            clipped, repeated = Run(clip=0.3, steps=3), Run(clip=math.inf, micro=2, steps=2)
            others |= {"repeated": repeated} if turn % 2 else {"clipped": clipped}
            if name in DEEP:
                others |= {"clipped": clipped, "repeated": repeated}
        for number, (label, base) in enumerate(others.items()):
            sets[label] = {
                f"{label}, stage {s}": replace(base, stage=s, bucket_mb=buckets[s])
                for s in ((turn + number) % 3, 3)
            }
    return sets


def assert_equal_bits(found: Trajectory, expected: Trajectory, what: str) -> None:
    for step, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert a.hex() == b.hex(), f"{what}: loss {step} is {a!r}, expected {b!r}"
    for step, (a, b) in enumerate(zip(found.norms, expected.norms, strict=True)):
        assert a.hex() == b.hex(), f"{what}: norm {step} is {a!r}, expected {b!r}"
    assert found.weights == expected.weights, f"{what}: the weights at the end differ"


def assert_same_start(found: Trajectory, expected: Trajectory, what: str) -> None:
    """As `assert_equal_bits`, as far as the shorter run goes."""
    if len(found.losses) == len(expected.losses):
        assert_equal_bits(found, expected, what)
        return
    start = Trajectory(
        expected.losses[: len(found.losses)], expected.norms[: len(found.norms)], found.weights
    )
    assert_equal_bits(found, start, what)


def relative(found: list[float], expected: list[float]) -> float:
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True)), default=0.0)


@pytest.mark.parametrize(
    ("name", "world"),
    [(name, world) for name in NAMES for world in worlds_of(name)],
)
def test_stages_are_identical_bits_and_equal_one_process(name: str, world: int) -> None:
    sets = runs_of(name, world)
    ranks = run_ranks(world, train_all, name, {k: run for runs in sets.values() for k, run in runs.items()})
    alone = run_alone(train_alone, name, replace(MEASURED, steps=STEPS[world]), world)
    for rank, results in enumerate(ranks):
        for runs in sets.values():
            first, *others = runs
            for label in others:
                assert_same_start(results[label], results[first], f"rank {rank}, {label} against {first}")
        plain = results["stage 3"]
        assert_equal_bits(plain, alone[rank], f"rank {rank} against one process")
        for stage in STAGES:
            if (label := f"stage {stage}") in results:
                assert results[label].buffers == alone[rank].buffers, f"rank {rank}: buffers"
        for label, result in results.items():
            assert result.norms == ranks[0][label].norms, f"ranks disagree about the norm, {label}"
            assert result.weights == ranks[0][label].weights, f"ranks disagree about the weights, {label}"
            assert all(map(math.isfinite, result.losses))


@pytest.mark.parametrize(("name", "world"), [("gpt", 3), ("resnet", 2), ("tiny_parameters", 4)])
def test_accumulation_equals_one_process_that_sums_micro_batches_first(name: str, world: int) -> None:
    """In bits where 1/N is a power of two: zerokit multiplies each micro-batch by it, the oracle their sum."""
    run = Run(stage=3, micro=3, accumulate=True, steps=3, clip=math.inf)
    ranks = run_ranks(world, train_all, name, {"accumulated": run})
    for rank, expected in enumerate(run_alone(train_alone, name, run, world)):
        found = ranks[rank]["accumulated"]
        if world in (2, 4):
            assert_equal_bits(found, expected, f"rank {rank}")
        assert relative(found.losses, expected.losses) <= 1e-6
        assert relative(found.norms, expected.norms) <= 1e-6


@pytest.mark.parametrize("name", ["gpt", "lora"])
def test_measuring_the_norm_changes_nothing(name: str) -> None:
    runs = {"measured": Run(stage=2, clip=math.inf, steps=3), "not": Run(stage=2, clip=None, steps=3)}
    for results in run_ranks(2, train_all, name, runs):
        assert results["measured"].losses == results["not"].losses
        assert results["measured"].weights == results["not"].weights
