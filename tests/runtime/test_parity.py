"""Stages 0 to 3 are one computation: the same bits, whatever the units, and the same as without zerokit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.support.distributed import run_alone, run_ranks
from tests.support.models import CASES, FEW
from tests.support.oracle import train_alone
from tests.support.training import LARGE, SMALL, Run, Trajectory, mixed, train_all

STAGES = (0, 1, 2, 3)
#: MiB: some neighbours join (1,000 fp32 elements).
MIDDLE = 0.004

NAMES = list(CASES)
#: The first step records the order of units, the second one is the first to know it; AdamW's states differ in all.
PLAIN = Run(clip=math.inf, steps=4)
#: Whatever is special about these and about how many ranks there are may meet: they run on three ranks and on four,
#: with other loops, too. Others run on three or on four by turns, there at stage 3 and another by turns.
DEEP = {"gpt", "lora", "tiny_parameters", "unused_everywhere", "unit_unused_on_one_rank"}
LOOPS = {
    "accumulated": Run(clip=math.inf, micro=3, accumulate=True, steps=2),
    "repeated": Run(clip=math.inf, micro=2, steps=2),
    "clipped": Run(clip=0.3, steps=3),
}


def worlds_of(name: str) -> list[int]:
    more = [3, 4] if name in DEEP else [3 + NAMES.index(name) % 2]
    return [*([1] if name in FEW else []), 2, *more]


def runs_of(name: str, world: int) -> dict[str, dict[str, Run]]:
    """Sets of runs that must agree bit for bit; `plain` also meets the oracle.

    Other buckets meet two stages each, stage 3 and another or two by turns, and so do stages that differ by module.
    """
    turn = NAMES.index(name)

    def at(base: Run, stage: int) -> Run:
        return replace(base, stage=stage, bucket_mb=SMALL if stage % 2 else MIDDLE)

    stages = STAGES if name in DEEP or world == 2 else (turn % 3, 3)
    sets = {"plain": {f"stage {stage}": at(PLAIN, stage) for stage in stages}}
    if world == 2 or name in DEEP:
        own = mixed(name, 3, *([0, 2], [1, 2, 0], [2])[turn % 3])
        sets["plain"]["a stage for each module"] = replace(
            PLAIN, stage=own, bucket_mb=(SMALL, MIDDLE)[turn % 2]
        )
    if world == 2:
        more = [(0, LARGE, False), (3, LARGE, True)], [(2, SMALL, True), (3, MIDDLE, False)]
        for stage, bucket_mb, backward in more[turn % 2]:
            run = replace(PLAIN, stage=stage, bucket_mb=bucket_mb, plain_backward=backward)
            sets["plain"][f"stage {stage}, buckets of {bucket_mb} MiB"] = run
        for number, (label, base) in enumerate(LOOPS.items() if name in DEEP else ()):
            sets[label] = {f"{label}, stage {s}": at(base, s) for s in ((turn + number) % 3, 3)}
            own = mixed(name, 3, (turn + number) % 3)
            sets[label][f"{label}, a stage for each module"] = replace(base, stage=own)
    return sets


def assert_equal_bits(found: Trajectory, expected: Trajectory, what: str) -> None:
    for step, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert a.hex() == b.hex(), f"{what}: loss {step} is {a!r}, expected {b!r}"
    for step, (a, b) in enumerate(zip(found.norms, expected.norms, strict=True)):
        assert a.hex() == b.hex(), f"{what}: norm {step} is {a!r}, expected {b!r}"
    assert found.weights == expected.weights, f"{what}: the weights at the end differ"


def relative(found: list[float], expected: list[float]) -> float:
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True)), default=0.0)


@pytest.mark.full(default=["*-[12]", "gpt-*"])
@pytest.mark.parametrize(("name", "world"), [(name, world) for name in NAMES for world in worlds_of(name)])
def test_stages_are_identical_bits_and_equal_one_process(name: str, world: int) -> None:
    sets = runs_of(name, world)
    ranks = run_ranks(world, train_all, name, {k: run for runs in sets.values() for k, run in runs.items()})
    alone = run_alone(train_alone, name, PLAIN, world)
    for rank, results in enumerate(ranks):
        for runs in sets.values():
            first, *others = runs
            for label in others:
                assert_equal_bits(results[label], results[first], f"rank {rank}, {label} against {first}")
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
