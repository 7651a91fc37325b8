"""What people do out of habit around a model: each is right, or refused at once with the line to write instead.

The table of habits in docs/porting.md says the same.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerokit
from tests.support.distributed import run_alone
from tests.support.on_ranks import on_ranks
from zerokit.placement import stage_of
from zerokit.runtime.hooks import require_no_graphs
from zerokit.runtime.precision import DtypeName


def _model(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth)))


def _optimizer(model: nn.Module, stage: int) -> zerokit.ZeroOptimizer:
    return zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage_of(stage), precision="fp32", lr=1e-2)


def _train(model: Callable[[torch.Tensor], torch.Tensor], optimizer: zerokit.ZeroOptimizer) -> list[float]:
    inputs = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 16, generator=inputs)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class _Block(nn.Module):
    """`part` may be compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.part: Callable[[torch.Tensor], torch.Tensor] = self.own

    def own(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(x)


class _Tied(nn.Module):
    """Reads a weight outside the module that holds it."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.first.weight


def _compiled(stage: int, how: str, precision: DtypeName = "fp32") -> list[float]:
    """Losses of blocks, compiled in some way."""
    warnings.simplefilter("ignore")  # dynamo's, of what it does not trace
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = [_Block() for _ in range(4)]
    compile_: Any = partial(torch.compile, backend="aot_eager")
    if how == "methods":
        for block in blocks:
            block.part = compile_(block.own)
    model: Any = _Tied([*blocks])
    names = [name for name, _ in model.named_parameters()]
    if how == "blocks":
        model.blocks = nn.ModuleList(compile_(block, fullgraph=True) for block in blocks)
    if how == "before":
        model = compile_(model)
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage_of(stage), precision=precision, lr=1e-2
    )
    assert [parameter.name for unit in optimizer.layout.units for parameter in unit.parameters] == names
    if how == "after":
        model = compile_(model)
    if how == "in place":
        model.compile(backend="aot_eager")
    if how == "blocks in place":
        for block in blocks:
            block.compile(backend="aot_eager")
    counters.clear()
    losses = _train(model, optimizer)
    graphs = counters["stats"]["unique_graphs"]
    # Blocks share their code, and so one graph; a whole model has others before, between and after them.
    most = {"plain": 0, "before": 5, "after": 5, "in place": 5}.get(how, 2)
    assert graphs <= most, f"{how}: the hooks divide graphs, {graphs} of them"
    return losses


def _ddp_before(stage: int) -> Any:
    return _optimizer(nn.parallel.DistributedDataParallel(_model()), stage)


def _ddp_after(stage: int) -> Any:
    model = _model()
    optimizer = _optimizer(model, stage)
    return _train(nn.parallel.DistributedDataParallel(model), optimizer)


def _fully_shard_before(stage: int) -> Any:
    model = _model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return _optimizer(model, stage)


def _fully_shard_after(stage: int) -> Any:
    model = _model()
    optimizer = _optimizer(model, stage)
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    return _train(model, optimizer)


REFUSED: dict[str, tuple[Callable[[int], Any], tuple[int, ...], str]] = {
    "DistributedDataParallel before": (_ddp_before, (0, 3), "pass the plain model"),
    "DistributedDataParallel after": (_ddp_after, (0, 2), "call the model without DistributedDataParallel"),
    "DistributedDataParallel after, of what is freed": (_ddp_after, (3,), "divided over ranks"),
    "fully_shard before": (_fully_shard_before, (3,), "pass the plain model"),
    "fully_shard after": (_fully_shard_after, (0, 2), "omit fully_shard()"),
    "fully_shard after, of what is freed": (_fully_shard_after, (3,), "divided over ranks"),
}
# Stages by turns: a compiler takes seconds over each.
COMPILED = [
    (3, "before"),
    (3, "after"),
    (3, "in place"),
    (3, "blocks in place"),
    (0, "blocks"),
    (3, "blocks"),
    (3, "methods"),
]


@on_ranks(2, [(habit, stage) for habit, (_, stages, _) in REFUSED.items() for stage in stages], timeout=30.0)
def test_a_habit_that_cannot_work_is_refused_with_the_line_to_write(given: tuple[str, int]) -> None:
    habit, stage = given
    attempt, _, words = REFUSED[habit]
    with pytest.raises(Exception, match=re.escape(words)) as refusal:
        attempt(stage)
    assert isinstance(refusal.value, zerokit.UsageError) or "UsageError" in str(refusal.value)


@on_ranks(2, COMPILED)
def test_whatever_is_compiled_trains_as_without_in_few_graphs(given: tuple[int, str]) -> None:
    stage, how = given
    precision: DtypeName = "bf16" if how == "blocks" else "fp32"
    assert _compiled(stage, how, precision) == pytest.approx(_compiled(0, "plain", precision), rel=1e-6)


@on_ranks(2, (2, 3))
def test_a_profile_names_units(stage: int) -> None:
    model = _model()
    optimizer = _optimizer(model, stage)
    _train(model, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        _train(model, optimizer)
    whole = "0.weight .. 3.bias"  # small neighbours are one unit
    assert sorted({event.key for event in profile.key_averages() if event.key.startswith("zerokit: ")}) == [
        f"zerokit: gather {whole}",
        f"zerokit: reduce {whole}",
        "zerokit: update",
        f"zerokit: wait for the gather of {whole}",
        f"zerokit: wait for the reduction of {whole}",
    ]


def _modes() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # what Inductor imports
    words = {"in place": "1 is compiled with CUDA graphs", "replaced": "mode='default'"}
    for mode, how in itertools.product(("default", "reduce-overhead", "max-autotune-no-cudagraphs"), words):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if how == "in place":
            model[1].compile(mode=mode)
        else:
            model[1] = torch.compile(model[1], mode=mode)  # type: ignore[assignment]
        refuses = mode == "reduce-overhead"
        with pytest.raises(zerokit.UsageError, match=words[how]) if refuses else nullcontext():
            require_no_graphs(model)


def test_blocks_compiled_with_cuda_graphs_are_refused_by_name() -> None:
    """Stage 3 on CUDA asks so in its first forward; nothing is compiled yet."""
    run_alone(_modes)
