"""What N ranks saved continues on M with the same bits; what is wrong is said on every rank, and not used."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.checkpoints import flip, with_extra
from tests.support.crashes import read_tree
from tests.support.distributed import run_ranks
from tests.support.models import CASES
from tests.support.on_ranks import on_ranks
from tests.support.optimizers import OPTIMIZERS
from tests.support.saving import in_turn
from tests.support.training import Run, Trajectory, build_seeded, digest, one_step, whole_weights, wrap
from zerokit.checkpoint.disk import new_file, read_exactly
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


@pytest.mark.full(default="[13]")
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


@on_ranks(2)
def test_counts_that_differ_within_a_unit_continue(tmp_path: Path) -> None:
    warnings.filterwarnings("ignore", ".*no optimizer states, which begin with the first step")
    for number, (bucket_mb, frozen) in enumerate(product((SMALL, LARGE), ((1, 2), (0, 1, 2, 3)))):
        run = f"{tmp_path}/{number}"
        expected = _freezing(number % 3, bucket_mb, frozen, run, False)
        for stage in (0, 3) if bucket_mb == SMALL else (1, 2):
            assert _freezing(stage, bucket_mb, frozen, run, True) == expected
        optimizer = wrap(
            build_seeded(CASES["gpt"], 9), CASES["gpt"], Run(bucket_mb=SMALL + LARGE - bucket_mb)
        )
        load(run, optimizer)
        save(f"{run}-again", optimizer, step=4)
        assert zerokit.diff(run, f"{run}-again").same


CASE = CASES["gpt_groups"]


@on_ranks(2)
def test_what_cannot_be_saved_is_refused_everywhere_and_leaves_nothing(tmp_path: Path) -> None:
    rank = dist.get_rank()
    (tmp_path / "file").touch()
    zero = wrap(build_seeded(CASE, 0), CASE, Run(stage=3))
    own = Path(tempfile.mkdtemp())

    def refused(expected: str, run: Any = "run", *, step: Any = 1, kind: Any = None, **options: Any) -> None:
        with pytest.raises(kind or zerokit.CheckpointError, match=re.escape(expected)):
            save(run and f"{tmp_path}/{run}", zero, step=step, **options)

    def full(*arguments: Any) -> None:
        raise zerokit.CheckpointError("the disk is full")

    def elsewhere(path: Path, size: int) -> Any:
        return new_file(own / path.name, size)

    for wrong in (-1, 1.5, True, "7"):
        refused("step=", step=wrong, kind=zerokit.UsageError)
        refused("rank 1: step=", step=wrong if rank else 3, kind=zerokit.UsageError)
    refused("step differs between ranks: 1 on rank 0; 2 on rank 1", step=1 + rank)
    runs = f"'{tmp_path}/run0' on rank 0; '{tmp_path}/run1' on rank 1"
    refused(f"the run directory differs between ranks: {runs}", f"run{rank}")
    for option in ("overwrite", "blocking"):
        expected = f"{option} differs between ranks: False on rank 0; True on rank 1"
        refused(expected, **{option: rank == 1})
    zero.param_groups[0]["lr"] = 0.5 + rank  # a scheduler that one rank forgot
    refused("option 'lr' of parameter group 0 differs between ranks: 0.5 on rank 0; 1.5 on rank 1")
    zero.param_groups[0]["lr"] = 0.5
    refused("nested", extra={"nested": [1, {"here": print}]})
    refused("file", "file")
    refused("rank 1: TypeError: ", None if rank else "run")
    # As on a node with a disk of its own: what is written there is not where rank 0 looks.
    with patch("zerokit.checkpoint.writing.new_file", elsewhere if rank else new_file):
        refused("not shared between the nodes")
    with patch("zerokit.checkpoint.writing.write_exactly", full) if rank else contextlib.nullcontext():
        refused("rank 1: the disk is full")
    assert rank or not [path for path in tmp_path.rglob("*") if path.name not in ("file", "run")]
    save(f"{tmp_path}/run", zero, step=7)
    refused("already saved", step=7)
    for place in ("step-00000007", "step-00000007/inner"):
        for overwrite in (False, True):
            refused(f'zerokit.save("{tmp_path}/run", optimizer', f"run/{place}", overwrite=overwrite)
    assert zerokit.verify(f"{tmp_path}/run").intact
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step-00000007"]


RANK = [f"rank-0000{rank}-of-00003.safetensors" for rank in range(3)]
FAULTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "data": (RANK[1], lambda path: flip(path, -100)),
    "header": (RANK[2], lambda path: flip(path, 40)),
    "manifest": ("manifest.json", lambda path: flip(path, 300)),
    "extra": ("extra.json", lambda path: flip(path, 9)),
    "common": ("common.safetensors", lambda path: flip(path, -3)),
    "missing file": (RANK[1], Path.unlink),
}
OPTIONS = {"lr": 9.0}
# Well sealed and wrong.
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "1": ({"groups": [OPTIONS | {"params": []}, OPTIONS]}, "'groups'[0] has the member 'params'"),
    "5": ({"rng": {"world": 5, "seed": 0, "step": 0}}, "expected uint8 [5, bytes]"),
}
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "another optimizer": OPTIMIZERS["momentum"],
    "another option": (torch.optim.AdamW, {"amsgrad": True}),
    "a count that is not there": (torch.optim.NAdam, {}),
}
UNFIT = {
    "another optimizer": "momentum_buffer",
    "another option": "max_exp_avg_sq",
    "a count that is not there": "mu_product",
    "one group": "parameter groups",
    "another width": "norm.weight",
    "frozen": "frozen",
}


def _damaged(folder: str) -> None:
    """`load` names the file, and either nothing has changed or a step is refused."""
    found, model, run = set(), build_seeded(CASE, 0), Run(stage=3)
    zero = wrap(model, CASE, run)
    for fault, (file, _) in FAULTS.items():
        before = digest(whole_weights(model).items())
        with pytest.raises(zerokit.CheckpointError, match=re.escape(file)):
            load(f"{folder}/{fault}/run", zero)
        if zero.refusal:
            with pytest.raises(zerokit.UsageError):
                one_step(model, zero, CASE, run, 0, Trajectory())
        else:
            assert digest(whole_weights(model).items()) == before, fault
        # A good load makes it usable again.
        load(f"{folder}/run", zero)
        one_step(model, zero, CASE, run, 2, Trajectory())
        found.add(digest(whole_weights(model).items()))
    assert len(found) == 1


def _hostile(folder: str) -> None:
    """Members of `extra.json` are refused before anything changes."""
    zero = wrap(build_seeded(CASE, 0), CASE, Run(stage=2))
    before = [list(group["params"]) for group in zero.runtime.inner.param_groups]
    rates = [group["lr"] for group in zero.param_groups]
    for name, (_, expected) in HOSTILE.items():
        with pytest.raises(zerokit.CheckpointError, match=re.escape(expected)):
            load(os.path.join(folder, name), zero)
        assert zero.refusal == ""
    for ours, group in zip(before, zero.runtime.inner.param_groups, strict=True):
        assert all(a is b for a, b in zip(ours, group["params"], strict=True))
    assert rates == [group["lr"] for group in zero.param_groups]
    load(f"{folder}/run", zero)


def _unfit(folder: str) -> None:
    """What does not fit is refused by name before anything changes."""
    for what, expected in UNFIT.items():
        model = build_seeded(CASE, 0)
        if what == "another width":
            model.norm = nn.LayerNorm(7)
        if what == "frozen":
            next(model.parameters()).requires_grad_(False)
        assert CASE.groups is not None
        groups: list[Any] = list(CASE.groups(model) if what in OTHERS else model.parameters())
        cls, options = OTHERS.get(what, OPTIMIZERS["adamw"])
        trained = [p for p in groups if not isinstance(p, torch.Tensor) or p.requires_grad]
        zero = zerokit.ZeroOptimizer(model, cls, stage=2, precision="fp32", params=trained, **options)
        with pytest.raises(zerokit.CheckpointError, match=expected):
            load(f"{folder}/run", zero)
        assert zero.refusal == ""


class _Buffered(nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, values: torch.Tensor) -> Any:
        return self.linear(values)


def _unfit_buffers(folder: str) -> None:
    """Found before a weight changes; `strict=False` takes those that fit."""

    def built(**buffers: torch.Tensor) -> tuple[_Buffered, zerokit.ZeroOptimizer]:
        torch.manual_seed(0)
        model = _Buffered(**buffers)
        return model, zerokit.ZeroOptimizer(model, torch.optim.AdamW, precision="fp32", lr=0.1)

    def step(model: _Buffered, zero: zerokit.ZeroOptimizer) -> None:
        zero.backward(model(torch.ones(2, 3)).square().sum())
        zero.step()

    mean, seen = torch.arange(4.0), torch.tensor(3)
    model, zero = built(mean=mean.clone(), seen=seen.clone())
    step(model, zero)
    save(f"{folder}/buffers", zero, step=1)
    saved = digest(whole_weights(model).items())
    for buffers, message in (
        ({"mean": mean}, "buffers on one side only: seen"),
        ({"mean": mean, "seen": seen, "more": mean}, "buffers on one side only: more"),
        ({"mean": torch.zeros(5), "seen": seen}, r"mean is \[4\] there and \[5\] here"),
        ({"mean": mean, "seen": torch.tensor(0.5)}, "seen is int64 there and float32 here"),
        ({"mean": torch.zeros(4, dtype=torch.int64), "seen": seen}, "mean is float32 there and int64 here"),
    ):
        for weights_only in (False, True):
            model, zero = built(**{name: torch.zeros_like(value) for name, value in buffers.items()})
            before = digest(whole_weights(model).items()), digest(model.named_buffers())
            with pytest.raises(zerokit.CheckpointError, match=message):
                load(f"{folder}/buffers", zero, weights_only=weights_only)
            assert (digest(whole_weights(model).items()), digest(model.named_buffers())) == before
            assert not zero.refusal
            assert not any(zero.state.values())
            step(model, zero)
        warns: Any = pytest.warns(UserWarning, match=message)
        with contextlib.nullcontext() if dist.get_rank() else warns:
            load(f"{folder}/buffers", zero, strict=False)
        assert digest(whole_weights(model).items()) == saved
    model, zero = built(mean=torch.zeros(4, dtype=torch.bfloat16), seen=torch.tensor(0))
    load(f"{folder}/buffers", zero)  # floating-point numbers are converted, as those of weights are
    assert (model.get_buffer("mean").tolist(), model.get_buffer("seen").item()) == ([0.0, 1.0, 2.0, 3.0], 3)


def _of_another_optimizer(folder: str) -> None:
    """Its states begin anew, and its options are not taken; those of Adam do not make one of AdamW."""
    built = partial(zerokit.ZeroOptimizer, precision="fp32")
    save(f"{folder}/adam", built(build_seeded(CASE, 0), torch.optim.Adam, lr=0.5), step=2)
    zero = built(build_seeded(CASE, 0), torch.optim.AdamW)
    load(f"{folder}/adam", zero)
    assert (zero.param_groups[0]["lr"], zero.param_groups[0]["decoupled_weight_decay"]) == (0.5, True)
    for stage in (0, 3):
        model = build_seeded(CASE, 0)
        groups: Any = CASE.groups(model)  # type: ignore[misc]
        zero = built(model, torch.optim.Adamax, stage=stage, params=groups, eps=0.25)
        warns: Any = pytest.warns(UserWarning, match=r"\(Adamax\) keeps exp_avg, exp_inf")
        with contextlib.nullcontext() if dist.get_rank() else warns:
            load(f"{folder}/run", zero, strict=False)
        assert not any(zero.state.values())
        assert zero.param_groups[0]["eps"] == 0.25
        one_step(model, zero, CASE, Run(), 0, Trajectory())


def _untied(folder: str) -> None:
    """Weights that were tied each take the saved values and states."""

    def built(*, tied: bool) -> tuple[nn.Module, zerokit.ZeroOptimizer]:
        model = nn.Sequential(nn.Embedding(33, 40), nn.Linear(40, 33, bias=False))
        if tied:
            model[1].weight = model[0].weight
        zero = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="fp32", bucket_mb=1e-6)
        zero.backward(model(torch.arange(33)).square().sum())
        zero.step()
        return model, zero

    model, zero = built(tied=True)
    save(f"{folder}/tied", zero, step=1)
    apart, other = built(tied=False)
    load(f"{folder}/tied", other)
    saved, found = whole_weights(model)["0.weight"], whole_weights(apart)
    assert torch.equal(found["0.weight"], saved)
    assert torch.equal(found["1.weight"], saved)


def _bytes_read(folder: str) -> None:
    """A rank reads its own intervals only."""
    for stage in range(4):
        zero, read = wrap(build_seeded(CASE, 0), CASE, Run(stage=stage)), 0

        def counting(fd: int, buffers: Any, offset: int, where: Any) -> None:
            nonlocal read
            read += sum(memoryview(buffer).nbytes for buffer in buffers)
            read_exactly(fd, buffers, offset, where)

        with patch("zerokit.checkpoint.requests.read_exactly", counting):
            load(f"{folder}/run", zero)
        own = sum(unit.payload_within(unit.shard(dist.get_rank())) for unit in zero.layout.units)
        whole = sum(unit.payload_numel for unit in zero.layout.units)
        assert read == 4 * 3 * (own if stage else whole), stage


def test_loads_of_what_is_damaged_hostile_or_does_not_fit(tmp_path: Path) -> None:
    """Loads copies of a run, each with one fault, and steps whose checksums are right but whose content is wrong."""
    run_ranks(3, _saved, str(tmp_path))
    for name, (file, damage) in FAULTS.items():
        shutil.copytree(tmp_path / "run", tmp_path / name / "run")
        damage(tmp_path / name / "run" / "step-00000002" / file)
    for name, (change, _) in HOSTILE.items():
        shutil.copytree(tmp_path / "run" / "step-00000002", tmp_path / name)
        with_extra(tmp_path / name, change)
    works = [_damaged, _hostile, _unfit, _unfit_buffers, _of_another_optimizer, _untied, _bytes_read]
    run_ranks(2, in_turn, works, str(tmp_path), apart=False)


def _saved(directory: str) -> None:
    model, run = build_seeded(CASE, 0), Run(stage=2)
    zero = wrap(model, CASE, run)
    for step in (0, 1):
        one_step(model, zero, CASE, run, step, Trajectory())
    save(f"{directory}/run", zero, step=2)
