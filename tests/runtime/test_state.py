"""Weights in and out: `state_dict`, `load_state_dict`, and models built on `meta`."""

from __future__ import annotations

import io
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.distributed import run_each, run_ranks
from tests.support.models import CASES
from tests.support.models.transformers import Gpt
from tests.support.on_ranks import on_ranks
from tests.support.training import (
    LARGE,
    Run,
    Trajectory,
    build_seeded,
    digest,
    one_step,
    trained,
    whole_weights,
    wrap,
)
from zerokit.placement import stage_of

STAGES = (0, 1, 2, 3)


@on_ranks(3, [("gpt", 3), ("encoder_decoder", 1), ("tiny_parameters", 2), ("lora", 0)])
def test_state_dict_round_trip(given: tuple[str, int]) -> None:
    """Trains, saves through a file, loads into a plain model and at another stage, and trains on at both."""
    name, stage = given
    run = Run(stage=stage, optimizer="sgd")
    case, model, optimizer = trained(name, run, 2)
    state = model.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    at_save = digest(sorted(state.items()))
    one_step(model, optimizer, case, run, 2, Trajectory())  # must not reach into what was saved
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    plain = build_seeded(case, 3)
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(loaded)
    assert at_save == digest(sorted(loaded.items())) == digest(sorted(plain.state_dict().items()))
    on_all_ranks: list[Any] = [None] * 3
    dist.all_gather_object(on_all_ranks, at_save)
    assert set(on_all_ranks) == {at_save}

    _, other, again = trained(name, Run(stage=3 - stage, optimizer="sgd", bucket_mb=LARGE), 1)
    missing = other.load_state_dict(loaded)
    assert (missing.missing_keys, missing.unexpected_keys) == ([], [])
    one_step(other, again, case, run, 2, Trajectory())
    assert digest(whole_weights(model).items()) == digest(whole_weights(other).items())


def _constant(module: nn.Module) -> None:
    for position, parameter in enumerate(module.parameters(recurse=False)):
        torch.nn.init.normal_(parameter, mean=float(position), std=0.02)


def _meta_build(
    stages: tuple[int, ...], init: bool, precision: str, same_seed: bool = True
) -> list[tuple[str, str]]:
    """The weights after construction and after two steps, for each stage; buckets by turns, at stage 3 both."""
    found = []
    for stage in stages:
        for bucket_mb in (1e-6, 64.0) if stage == 3 else (1e-6,) if stage % 2 else (64.0,):
            torch.manual_seed(31 if same_seed else 31 + dist.get_rank())
            with torch.device("meta"):
                model = Gpt(depth=2)
            run = Run(stage=stage, bucket_mb=bucket_mb, precision=precision)
            optimizer = wrap(model, CASES["gpt"], run, init_fn=_constant if init else None)
            at_start = digest(whole_weights(model).items())
            # The data of two ranks differ from those of three, so only one rank trains.
            if dist.get_world_size() == 1:
                for step in range(2):
                    one_step(model, optimizer, CASES["gpt"], run, step, Trajectory())
            found.append((at_start, digest(whole_weights(model).items())))
    return found


@pytest.mark.parametrize(("precision", "init"), [("fp32", True), ("bf16", False)])
def test_meta_models_get_the_same_weights_for_every_world_and_stage(init: bool, precision: str) -> None:
    alone, *others = (run_ranks(world, _meta_build, STAGES, init, precision) for world in (1, 3))
    starts, ends = map(set, zip(*alone[0], strict=True))
    for ranks in others:
        starts |= {start for found in ranks for start, _ in found}
    assert len(starts) == 1
    assert len(ends) == 1


def test_meta_models_follow_rank_0s_seed_where_seeds_differ() -> None:
    expected = run_ranks(1, _meta_build, (0,), False, "fp32")[0][0][0]
    for found in run_ranks(2, _meta_build, (0, 3), False, "fp32", False):
        assert {start for start, _ in found} == {expected}


@on_ranks(2)
def test_meta_models_are_initialised_by_their_modules() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(50, 40), nn.BatchNorm1d(40), nn.Linear(40, 50))
    zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=3, precision="fp32", lr=0.1)
    weights = whole_weights(model)
    first, second = weights["0.weight"], weights["2.weight"]
    assert first.std().item() == pytest.approx(1 / (3 * 50) ** 0.5, rel=0.1)  # Linear: uniform in ±1/sqrt(in)
    assert not torch.equal(first.flatten()[:100], second.flatten()[:100])
    assert weights["1.weight"].unique().tolist() == [1.0]
    assert [buffer.unique().tolist() for buffer in model.buffers()] == [[0.0], [1.0], [0]]
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cpu"}
    assert torch.equal(state, torch.get_rng_state()), "construction moved the user's random state"


class Bare(nn.Module):
    """A parameter of its own, and no way to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(4, 4))


@on_ranks(2)
def test_a_meta_module_that_cannot_initialise_itself_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Bare())
    with pytest.raises(zerokit.UsageError, match=r"Bare.*init_fn"):
        zerokit.ZeroOptimizer(model, torch.optim.SGD, precision="fp32", lr=0.1)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _meta_peak(stage: int) -> int:
    """The largest number of bytes by which the process grew, seen from inside init_fn."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])
    sizes = []

    def init(module: nn.Module) -> None:
        nn.init.ones_(module.get_parameter("weight"))
        sizes.append(_resident_bytes())

    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.SGD, stage=stage_of(stage), precision="fp32", init_fn=init, bucket_mb=1e-6, lr=0.1
    )
    assert optimizer.stage == stage
    return max(sizes) - sizes[0]


def test_stage_3_builds_a_model_larger_than_a_rank_could_hold() -> None:
    """Sixteen layers of 4 MiB on four ranks: never more than the shards and a few layers at a time."""
    layer = 4 * 1024 * 1024
    for peak in run_ranks(4, _meta_peak, 3):
        assert peak <= 16 * layer // 4 + 3 * layer
    for peak in run_ranks(2, _meta_peak, 2):
        assert peak >= 14 * layer, "the measurement would not notice a whole model"


def _broadcast_from(rank: int) -> str:
    """Everything starts from rank 0's values: parameters, frozen ones, buffers."""
    torch.manual_seed(100 + dist.get_rank())
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    buffer = model.get_buffer("1.running_mean")
    buffer.normal_()
    mine = digest(model.state_dict().items())
    zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=stage_of(rank), precision="fp32", lr=0.1)
    return f"{mine} {digest(model.state_dict().items())}"


def test_every_rank_starts_from_rank_0() -> None:
    for texts in run_each(3, _broadcast_from, STAGES):
        found = [text.split() for text in texts]
        assert {after for _, after in found} == {found[0][0]}
        assert len({before for before, _ in found}) == 3
