"""What is saved by N ranks continues on M ranks, at any stage, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerokit
from tests.support.crashes import read_tree
from tests.support.distributed import run_ranks
from tests.support.models import CASES
from tests.support.training import Run, Trajectory, build_seeded, digest, one_step, whole_weights, wrap
from zerokit.checkpoint.formats.convert import reshard
from zerokit.checkpoint.load import load
from zerokit.checkpoint.save import save

STAGES = (0, 1, 2, 3)
SMALL, LARGE = 1e-6, 64.0


def _train(model: Any, optimizer: zerokit.ZeroOptimizer, name: str, run: Run, steps: range) -> Trajectory:
    trajectory = Trajectory()
    for step in steps:
        one_step(model, optimizer, CASES[name], run, step, trajectory)
    trajectory.weights = digest(whole_weights(model).items())
    trajectory.buffers = digest(model.named_buffers())
    return trajectory


def _save(name: str, run: Run, directory: str, steps: int = 2) -> list[str]:
    """Train, save, and train on: the bits of what follows."""
    model = build_seeded(CASES[name], dist.get_rank())
    optimizer = wrap(model, CASES[name], run)
    _train(model, optimizer, name, run, range(steps))
    save(directory, optimizer, step=steps)
    return _train(model, optimizer, name, run, range(steps, steps + 2)).bits()


def _continue(name: str, runs: list[Run], directory: str, first: int = 2) -> list[tuple[list[str], str]]:
    found = []
    for run in runs:
        model = build_seeded(CASES[name], 5 + dist.get_rank())
        optimizer = wrap(model, CASES[name], run)
        load(directory, optimizer)
        trajectory = _train(model, optimizer, name, run, range(first, first + 2))
        found.append((trajectory.bits(), trajectory.buffers))
    return found


WORLDS = {
    ("gpt", "fp32", "adamw"): (2, 4),
    ("lora", "bf16", "adamw"): (3,),
    ("tiny_parameters", "fp16", "adamw"): (1,),
    ("resnet", "fp32", "momentum"): (3,),
    ("gpt_groups", "bf16", "adam"): (1,),
}


def _run(case: tuple[str, str, str], stage: int, bucket_mb: float) -> Run:
    _, precision, optimizer = case
    return Run(stage=stage, precision=precision, optimizer=optimizer, bucket_mb=bucket_mb, clip=1.0)


def _save_all(folder: str) -> dict[str, list[str]]:
    return {case[0]: _save(case[0], _run(case, 3, SMALL), f"{folder}/{case[0]}/run") for case in WORLDS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[str]]]]:
    """A run of two ranks of every case, and what those came to when they went on."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(2, _save_all, str(folder))


def _compared(folder: str, world: int) -> dict[str, list[str]]:
    """On so many ranks, from what two have saved, and from what was cut for these: the bits of each case."""
    found = {}
    for case, worlds in WORLDS.items():
        name = case[0]
        if world not in worlds:
            continue
        run, resharded = f"{folder}/{name}/run", f"{folder}/{name}/to-{world}"
        runs = [_run(case, s, b) for s, b in zip(STAGES, (SMALL, LARGE, 0.004, SMALL), strict=True)]
        here = runs if world == 4 else runs[1::2]
        expected, *others = _continue(name, here, run) + _continue(name, [runs[world % 4]], resharded)
        assert others == [expected] * len(here), case
        model = build_seeded(CASES[name], 9)
        optimizer = wrap(model, CASES[name], runs[3])
        extra = load(run, optimizer)
        held = zerokit.Checkpoint(run)
        for key, value in whole_weights(model).items():
            saved = held.read("master" if held.layout.find(key)[0].trainable else "param", key)
            assert torch.equal(value, torch.as_tensor(saved).to(value.dtype)), key
        # What was cut is byte for byte what these ranks save.
        save(f"{folder}/{name}/{world}-saved", optimizer, step=2, extra=extra)
        found[name] = expected[0]
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_world_size_and_stage_continues_with_the_same_bits(
    world: int, saved: tuple[Path, list[dict[str, list[str]]]]
) -> None:
    folder, went_on = saved
    names = [case[0] for case, worlds in WORLDS.items() if world in worlds]
    for name in names:
        reshard(folder / name / "run", world, folder / name / f"to-{world}")
    found = run_ranks(world, _compared, str(folder), world)
    for name in names:
        assert read_tree(folder / name / f"to-{world}") == read_tree(folder / name / f"{world}-saved")
        if world == 2:
            assert [bits[name] for bits in found] == [bits[name] for bits in went_on]


def _draws(directory: str, resume: bool) -> list[float]:
    import random

    case, run = CASES["mlp_10_64_2"], Run(stage=1)
    torch.manual_seed(100 + dist.get_rank())
    random.seed(dist.get_rank())
    optimizer = wrap(build_seeded(case, 0), case, run)
    torch.manual_seed(7 + dist.get_rank())
    if resume:
        load(directory, optimizer)
    else:
        save(directory, optimizer, step=0)
    return [*torch.rand(3).tolist(), random.random()]


def _draws_twice(directory: str, resume: bool) -> tuple[list[float], list[float]]:
    return _draws(directory, resume), _draws(directory, True)


def test_generators_continue_and_differ_between_ranks(tmp_path: Path) -> None:
    for world in (2, 3):
        found = run_ranks(world, _draws_twice, str(tmp_path), world == 3)
        assert all(before == after for before, after in found)
    assert len({str(draws) for draws, _ in found}) == 3


def _freezing(stage: int, bucket_mb: float, frozen: Sequence[int], directory: str, resume: bool) -> list[str]:
    """A block that is frozen for some steps, after which it has another count of steps than others, or no states."""
    case, run = CASES["gpt"], Run(stage=stage, bucket_mb=bucket_mb)
    model = build_seeded(case, dist.get_rank() + 5 * resume)
    optimizer = wrap(model, case, run)
    block = model.get_submodule("blocks.1")
    trajectory = Trajectory()
    if resume:
        load(directory, optimizer)
    for step in range(4 if resume else 0, 6):
        block.requires_grad_(step not in frozen)
        if step == 4:
            trajectory = Trajectory()
            if not resume:
                save(directory, optimizer, step=4)
        one_step(model, optimizer, case, run, step, trajectory)
    trajectory.weights = digest(whole_weights(model).items())
    return trajectory.bits()


def _frozen_and_back(directory: str) -> None:
    for number, (bucket_mb, frozen) in enumerate(product((SMALL, LARGE), ((1, 2), (0, 1, 2, 3)))):
        run = f"{directory}/{number}"
        expected = _freezing(number % 3, bucket_mb, frozen, run, False)
        for stage in (0, 3) if bucket_mb == SMALL else (1, 2):
            assert _freezing(stage, bucket_mb, frozen, run, True) == expected
        optimizer = wrap(
            build_seeded(CASES["gpt"], 9), CASES["gpt"], Run(bucket_mb=SMALL + LARGE - bucket_mb)
        )
        load(run, optimizer)
        save(f"{run}-again", optimizer, step=4)
        assert zerokit.diff(run, f"{run}-again").same


def test_counts_that_differ_within_a_unit_continue(tmp_path: Path) -> None:
    run_ranks(2, _frozen_and_back, str(tmp_path))
