"""Ways to use a model that hooks could get wrong: evaluation, recomputation, several backwards, compiled parts."""

from __future__ import annotations

import math
import warnings
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.runtime.test_parity import assert_equal_bits
from tests.support.distributed import each, run_alone, run_ranks, run_ranks_expecting_errors
from tests.support.models import CASES
from tests.support.oracle import train_alone
from tests.support.training import (
    LARGE,
    SMALL,
    Run,
    Trajectory,
    build_seeded,
    digest,
    one_step,
    train_all,
    whole_weights,
    wrap,
)
from zerokit.placement import stage_of
from zerokit.runtime.hooks import require_no_graphs

STAGES = (0, 1, 2, 3)


NOTHING = "nothing"
IN_BETWEEN = ("evaluation", "inference mode", "a forward that is dropped", "a loss that is kept")


def _interrupted(stage: int, bucket_mb: float) -> dict[str, list[str]]:
    """Four steps with each of these in between."""
    found = {}
    for what in (NOTHING, *IN_BETWEEN):
        case, run = CASES["gpt"], Run(stage=stage, bucket_mb=bucket_mb)
        model = build_seeded(case, 0)
        optimizer = wrap(model, case, run)
        trajectory = Trajectory()
        _disturb(model, what, 40)
        for step in range(4):
            one_step(model, optimizer, case, Run(clip=1.0), step, trajectory)
            _disturb(model, what, step)
        trajectory.weights = digest(whole_weights(model).items())
        found[what] = trajectory.bits()
    return found


def _disturb(model: nn.Module, what: str, step: int) -> None:
    case = CASES["gpt"]
    batch = case.batch(1, step, dist.get_rank())
    if what == "evaluation":
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                assert math.isfinite(case.loss(model, batch).item())
        model.train()
    elif what == "inference mode":
        with torch.inference_mode():
            assert math.isfinite(case.loss(model, batch).item())
    elif what == "a forward that is dropped":
        case.loss(model, batch)
    elif what == "a loss that is kept":
        model.__dict__["kept"] = case.loss(model, batch).detach()


@pytest.mark.parametrize(("stage", "bucket_mb"), [(0, SMALL), (2, LARGE), (3, SMALL), (3, LARGE)])
def test_forwards_in_between_change_nothing(stage: int, bucket_mb: float) -> None:
    for found in run_ranks(2, _interrupted, stage, bucket_mb):
        for what in IN_BETWEEN:
            assert found[what] == found[NOTHING], what


# --- activation checkpointing ------------------------------------------------------------------------------


def test_reentrant_checkpointing_is_refused_or_right() -> None:
    run = Run(steps=4, clip=math.inf)
    alone = run_alone(train_alone, "gpt", run, 2)
    for stage in STAGES:
        stages = {"run": Run(stage=stage, steps=4, clip=math.inf)}
        outcomes = run_ranks_expecting_errors(2, train_all, "gpt_checkpoint_reentrant", stages, timeout=10.0)
        for rank, outcome in enumerate(outcomes):
            if outcome.ok:
                assert_equal_bits(outcome.value["run"], alone[rank], f"stage {stage}, rank {rank}")
            else:
                assert outcome.raised("ZerokitError"), outcome.describe()
                assert "use_reentrant=False" in outcome.error


# --- several backwards -------------------------------------------------------------------------------------


def _without_zero_grad(stage: int) -> list[float]:
    """As torch does, gradients add up over steps when zero_grad() is not called."""
    case, run = CASES["gpt"], Run(stage=stage, optimizer="sgd")
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run, lr=0.0)
    norms = []
    for _ in range(3):
        optimizer.backward(case.loss(model, case.batch(0, 0, dist.get_rank())))
        norms.append(optimizer.clip_grad_norm_(math.inf).item())
        optimizer.step()
    return norms


def test_gradients_add_up_without_zero_grad() -> None:
    for stages in run_ranks(2, each, _without_zero_grad, STAGES):
        for stage, norms in enumerate(stages):
            expected = pytest.approx([norms[0], 2 * norms[0], 3 * norms[0]], rel=1e-6)
            assert norms == expected, f"stage {stage}"


# --- torch.compile -----------------------------------------------------------------------------------------


def _compiled(stage: int, backend: str) -> list[float]:
    """Attention of one block and the MLP of another, or nothing."""
    # torch's own tracing asks for the .grad of activations, without zerokit too.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    case, run = CASES["gpt"], Run(stage=stage)
    model = build_seeded(case, 0)
    if backend:
        model.get_submodule("blocks.0.attention").compile(backend=backend)
        model.get_submodule("blocks.1.mlp").compile(backend=backend)
    optimizer = wrap(model, case, run)
    trajectory = Trajectory()
    for step in range(4):
        one_step(model, optimizer, case, Run(clip=1.0), step, trajectory)
    return [*trajectory.losses, *trajectory.norms]


@pytest.mark.parametrize(("stage", "backend"), [(2, "eager"), (3, "aot_eager")])
def test_compiled_inner_modules(stage: int, backend: str) -> None:
    eager = run_ranks(2, _compiled, 0, "")
    for rank, outcome in enumerate(run_ranks_expecting_errors(2, _compiled, stage, backend, timeout=60.0)):
        assert outcome.ok or outcome.raised("ZerokitError"), outcome.describe()
        if outcome.ok:
            assert outcome.value == pytest.approx(eager[rank], rel=1e-5)


# --- units -------------------------------------------------------------------------------------------------


def _with_units(stage: int, kind: str) -> dict[str, Any]:
    case = CASES["gpt"]
    model = build_seeded(case, 0)
    rules: dict[str, Any] = {
        "class": nn.LayerNorm,
        "classes": (nn.LayerNorm, nn.Linear, nn.Embedding),
        "predicate": lambda module: isinstance(module, nn.Linear) and module.bias is not None,
        "the root": lambda module: True,
    }
    optimizer = zerokit.ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=stage_of(stage),
        precision="fp32",
        bucket_mb=SMALL,
        units=rules[kind],
        lr=3e-3,
        weight_decay=0.05,
    )
    trajectory = Trajectory()
    for step in range(4):
        one_step(model, optimizer, case, Run(clip=math.inf), step, trajectory)
    trajectory.weights = digest(whole_weights(model).items())
    return {"bits": trajectory.bits(), "units": len(optimizer.layout.units)}


@cache
def _plain_units() -> list[list[str]]:
    ranks = run_ranks(2, train_all, "gpt", {"run": Run(steps=4, clip=math.inf)})
    return [results["run"].bits() for results in ranks]


@pytest.mark.parametrize("kind", ["class", "classes", "predicate", "the root"])
def test_units_change_no_bit(kind: str) -> None:
    counts = set()
    for stages, plain in zip(
        run_ranks(2, each, partial(_with_units, kind=kind), STAGES), _plain_units(), strict=True
    ):
        for found in stages:
            assert found["bits"] == plain
            counts.add(found["units"])
    assert len(counts) == 1, "the layout depends on the stage"
    if kind == "classes":
        assert counts == {count for count in counts if count > 10}


def _subgroup() -> str:
    """Two pairs of ranks, each with a process group and a model of its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    case = CASES["mlp_10_64_2"]
    torch.manual_seed(mine)
    model = case.build()
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.AdamW, stage=3, precision="fp32", process_group=groups[mine], lr=1e-2
    )
    for step in range(3):
        optimizer.backward(case.loss(model, case.batch(0, step, dist.get_rank() % 2)))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return digest(whole_weights(model).items())


def test_process_groups_that_are_a_part_of_the_world() -> None:
    first, second, third, fourth = run_ranks(4, _subgroup)
    assert first == second
    assert third == fourth
    assert first != third


# --- CUDA graphs -------------------------------------------------------------------------------------------


def _refused_modes() -> dict[str, list[str]]:
    warnings.simplefilter("ignore", DeprecationWarning)  # what Inductor imports
    found: dict[str, list[str]] = {}
    for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs"):
        in_place, replaced = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
        in_place[1].compile(mode=mode)
        replaced[1] = torch.compile(replaced[1], mode=mode)  # type: ignore[assignment]
        found[mode] = []
        for model in (in_place, replaced):
            try:
                require_no_graphs(model)
            except zerokit.UsageError as error:
                found[mode].append(str(error))
    return found


def test_blocks_compiled_with_cuda_graphs_are_refused_by_name() -> None:
    """Stage 3 on CUDA asks so in its first forward; nothing is compiled yet."""
    found = run_alone(_refused_modes)
    assert found.pop("default") == found.pop("max-autotune-no-cudagraphs") == []
    ((in_place, replaced),) = found.values()
    assert "1 is compiled with CUDA graphs" in in_place
    assert "mode='default'" in replaced
