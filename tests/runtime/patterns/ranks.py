# mypy: disable-error-code="no-any-return"
"""Ranks that do not all do the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.patterns.engines import STEPS, VARIED_STEPS, Engine
from tests.runtime.patterns.harness import Refused, Subject, always, usual
from tests.runtime.patterns.models import WIDTH, Block, Mlp, square

pattern = Subject(__name__)

SPLIT: dict[str, Any] = {"apart": True, "timeout": 4.0}
"""A refusal leaves ranks out of step, and some of them waiting."""
OR_RIGHT = SPLIT | {"refused": always(Refused("ScheduleError", (), everywhere=False, or_right=True))}
UNEQUAL = Refused(
    "ScheduleError", ("as many backward passes", "loss times 0"), everywhere=False, or_right=True
)
AT_STAGE_3 = SPLIT | {"refused": {3: UNEQUAL}}


class Skips(Mlp):
    """Runs the blocks whose places it is told."""

    def forward(self, x: Tensor, places: list[int]) -> Tensor:  # type: ignore[override]
        x = self.first(x)
        for place in places:
            x = self.blocks[place](x)
        return self.head(x)


def _skips(engine: Engine, *places: list[int]) -> None:
    """Every rank its own blocks; steps begin the list one further."""
    for step in range(VARIED_STEPS):
        own = places[(engine.rank + step // 2) % len(places)]
        engine.update(square(engine.model(engine.data(4, 8), own)), max_norm=0.1)


pattern("a rank that leaves out all blocks", Skips)(lambda engine: _skips(engine, [], [0, 1, 2]), "skips_all")
pattern("a rank that leaves out all blocks, three ranks", Skips, world=3)(
    lambda engine: _skips(engine, [0, 1, 2], [], [0, 1, 2]), "skips_all_three"
)
pattern("ranks that use disjoint blocks", Skips)(lambda engine: _skips(engine, [0, 2], [1]), "disjoint")
pattern("ranks that use disjoint blocks, four ranks", Skips, world=4)(
    lambda engine: _skips(engine, [0], [1], [2], []), "disjoint_four"
)


@pattern(
    "ranks that walk through their blocks in different orders",
    Skips,
    refused={3: Refused("ScheduleError", ("same order",), everywhere=False)},
    **SPLIT,
)
def orders(engine: Engine) -> None:
    _skips(engine, [0, 1, 2], [2, 0, 1])


@pattern("blocks used repeatedly, a number of times that differs by rank", Skips, **OR_RIGHT)
def repeated(engine: Engine) -> None:
    _skips(engine, [0, 1, 0, 1], [0, 1], [1, 1, 1, 0])


@pattern("layer drop, its seed differing by rank", lambda: Skips(4), world=3)
def layer_drop(engine: Engine) -> None:
    for _ in range(VARIED_STEPS):
        places = [place for place in range(4) if torch.rand(()) > 0.4]
        engine.update(square(engine.model(engine.data(4, 8), places)))


@pattern("layer drop by rank over layers that are shared (ALBERT)", Skips, **OR_RIGHT)
def shared_layer_drop(engine: Engine) -> None:
    for _ in range(VARIED_STEPS):
        places = [place % 2 for place in range(6) if torch.rand(()) > 0.4]
        engine.update(square(engine.model(engine.data(4, 8), places)))


class Experts(nn.Module):
    """Top-1 routing: an expert that no token of this rank chooses is not called."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == place)
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return y


def _moe(units: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(8, WIDTH), Experts(), Experts()) if units else Routed()


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.moe = Experts(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.first(x))


pattern("a mixture of experts, some not chosen, each expert a unit", lambda: _moe(False))(
    usual(3, 8), "experts"
)
pattern("a mixture of experts, each whole layer a unit, three ranks", lambda: _moe(True), world=3)(
    usual(3, 8), "expert_layers"
)


@pattern.each_step("a mixture of experts with checkpointing", lambda: _moe(True))
def experts_recomputed(engine: Engine) -> None:
    x = engine.data(3, 8)
    for layer in engine.model:
        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    engine.update(square(x))


class Tasks(Mlp):
    """A head for each task; a rank's batch has one task."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(3))

    def forward(self, x: Tensor, task: int) -> Tensor:  # type: ignore[override]
        return self.heads[task](self.features(x))


@pattern("a head for each task, ranks with different tasks, one head never used", Tasks)
def tasks(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        engine.update(square(engine.model(engine.data(4, 8), (engine.rank + step) % 2)))


@pattern("a batch of no rows on one rank", Mlp)
def no_rows(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        rows = 0 if step % engine.world == engine.rank else 4
        engine.update(engine.model(engine.data(rows, 8)).square().sum())


@pattern("sequences and batches of different sizes", Mlp, world=3)
def sizes(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        shape = (1 + engine.rank, 2 + (step + engine.rank) % 3, 8)
        engine.update(square(engine.model(engine.data(*shape))))


@pattern("a loss that one rank computes from features, another from the output", Mlp)
def different_losses(engine: Engine) -> None:
    taken: list[Tensor] = []
    engine.model.blocks[1].register_forward_hook(lambda module, args, output: taken.append(output))
    for _ in range(STEPS):
        taken.clear()
        y = engine.model(engine.data(4, 8))
        engine.update(square(y) if engine.rank == 0 else square(taken[0]))


@pattern.each_step("evaluation on rank 0's data only, all ranks calling", Mlp)
def same_evaluation(engine: Engine) -> None:
    with torch.no_grad():
        engine.record(square(engine.model(torch.ones(1 + 3 * engine.rank, 8))))
    engine.update(square(engine.model(engine.data(4, 8))))


@pattern("a masked loss: nothing but ignored targets on one rank", Mlp)
def ignored(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        targets = engine.ids(8, 4)
        if step % engine.world == engine.rank:
            targets.fill_(-100)
        y = engine.model(engine.data(4, 8))
        engine.update(F.cross_entropy(y, targets, reduction="sum", ignore_index=-100))


@pattern("a rank that starts no backward in some micro-batches", Mlp, **OR_RIGHT)
def fewer_backwards(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        with engine.accumulate():
            for micro in range(2):
                loss = square(engine.model(engine.data(4, 8)))
                engine.record(loss)
                if (step + micro + engine.rank) % 2:
                    engine.backward(loss)
        engine.step()
        engine.zero_grad()


@pattern("a number of backward passes that differs by rank", Mlp, refused=always(UNEQUAL), **SPLIT)
def more_backward_passes(engine: Engine) -> None:
    for _ in range(STEPS):
        for _ in range(1 if engine.plain else engine.rank + 1):
            engine.backward(square(engine.model(engine.data(4, 8))))
        engine.step()
        engine.zero_grad()
    engine.record(1)


@pattern.each_step(
    "a number of micro-batches inside `accumulate()` that differs by rank",
    Mlp,
    refused={3: UNEQUAL},
    apart=True,
    timeout=4.0,
)
def more_micro_batches(engine: Engine) -> None:
    with engine.accumulate():
        for _ in range(engine.rank + 1):
            engine.backward(square(engine.model(engine.data(4, 8))))
    engine.update(square(engine.model(engine.data(4, 8))))


@pattern(
    "ranks whose orders of blocks part in the third step",
    Skips,
    refused={3: Refused("ZerokitError", (), or_right=True)},
    **SPLIT,
)
def orders_later(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        places = [2, 0, 1] if step > 1 and engine.rank == 1 else [0, 1, 2]
        engine.update(square(engine.model(engine.data(4, 8), places)))


def _leave_out(engine: Engine, left_out: str) -> None:
    for step in range(VARIED_STEPS):
        engine.backward(square(engine.model(engine.data(4, 8))))
        skips = left_out if step == 2 and engine.rank == 1 and not engine.plain else ""
        if skips != "clip":
            engine.record(engine.clip(0.1))
        if skips != "step":
            engine.step()
        engine.zero_grad()


LEFT_OUT = always(Refused("ZerokitError", (), everywhere=False))
pattern("a rank that leaves out clipping once", Mlp, refused=LEFT_OUT, **SPLIT)(
    lambda engine: _leave_out(engine, "clip"), "left_out_clipping"
)
pattern("a rank that leaves out `step()` once", Mlp, refused=LEFT_OUT, **SPLIT)(
    lambda engine: _leave_out(engine, "step"), "left_out_step"
)


@pattern(
    "a rank that takes `model.state_dict()` alone",
    Mlp,
    refused={3: Refused("ScheduleError", (), everywhere=False)},
    **SPLIT,
)
def state_alone(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data(4, 8))))
    if engine.rank == 0:
        engine.record(len(engine.model.state_dict()))


@pattern("a rank that only calls `step()`", Mlp, **AT_STAGE_3)
def only_steps(engine: Engine) -> None:
    for step in range(STEPS):
        if engine.rank == 0 or step == 0:
            engine.backward(square(engine.model(engine.data(4, 8))))
        engine.step()
        engine.zero_grad()
    engine.record(1)


@pattern("a rank with an extra forward under `no_grad`", Mlp, **AT_STAGE_3)
def extra_forward(engine: Engine) -> None:
    for step in range(STEPS):
        if step == 1 and engine.rank == 0:
            with torch.no_grad():
                engine.model(torch.ones(2, 8))
        engine.update(square(engine.model(engine.data(4, 8))))


@pattern("a rank that calls the blocks past the model", Mlp, **AT_STAGE_3)
def past_the_model(engine: Engine) -> None:
    for step in range(STEPS):
        model, x = engine.model, engine.data(4, 8)
        past = step == 1 and engine.rank == 0
        y = (
            model.head(model.blocks[2](model.blocks[1](model.blocks[0](model.first(x)))))
            if past
            else model(x)
        )
        engine.update(square(y))
