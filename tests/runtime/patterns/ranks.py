# mypy: disable-error-code="no-any-return"
"""Ranks that do not all do the same, and islands (`LocalSteps`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.patterns.engines import STEPS, VARIED_STEPS, Engine
from tests.runtime.patterns.harness import Refused, Subject, always, updates, usual
from tests.runtime.patterns.models import WIDTH, Block, Mlp, square

pattern = Subject(__name__)

SPLIT: dict[str, Any] = {"apart": True, "timeout": 10.0}
"""A refusal leaves ranks out of step, and some of them waiting for all of the time-out."""
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


def skips(key: str, name: str, *places: list[int], **options: Any) -> None:
    """Every rank its own blocks; steps begin the list one further."""

    def step(engine: Engine) -> None:
        own = places[(engine.rank + engine.number // 2) % len(places)]
        engine.update(square(engine.model(engine.data(), own)), max_norm=0.1)

    pattern.each_step(name, Skips, steps=VARIED_STEPS, **options)(step, key)


SAME_ORDER = SPLIT | {"refused": {3: Refused("ScheduleError", ("same order",), everywhere=False)}}
skips("skips_all", "a rank that leaves out all blocks, three ranks", [0, 1, 2], [], [0, 1, 2], world=3)
skips("disjoint", "ranks that use disjoint blocks, four ranks", [0], [1], [2], [], world=4)
skips("orders", "ranks that walk through blocks in different orders", [0, 1, 2], [2, 0, 1], **SAME_ORDER)
REPEATED = [0, 1, 0, 1], [0, 1], [1, 1, 1, 0]
skips("repeated", "blocks used repeatedly, a number of times that differs by rank", *REPEATED, **OR_RIGHT)


def _layer_drop(engine: Engine, blocks: int, depth: int) -> None:
    places = [place % blocks for place in range(depth) if torch.rand(()) > 0.4]
    engine.update(square(engine.model(engine.data(), places)))
    with torch.no_grad():
        for block in engine.model.blocks:
            engine.record(square(block(torch.ones(2, WIDTH))))


pattern.each_step(
    "layer drop, its seed differing by rank; blocks evaluated by themselves",
    lambda: Skips(8),
    world=3,
    steps=VARIED_STEPS,
)(lambda engine: _layer_drop(engine, 8, 8), "layer_drop")
pattern.each_step(
    "layer drop by rank over layers that are shared (ALBERT)", Skips, steps=VARIED_STEPS, **OR_RIGHT
)(lambda engine: _layer_drop(engine, 2, 6), "shared_layer_drop")


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
                y = y.index_add(0, rows, self.run(expert, x[rows]) * weights[rows, None])
        return y

    def run(self, expert: nn.Module, x: Tensor) -> Any:
        return expert(x)


class ReadExperts(Experts):
    """Reads the weights of experts, which are never called."""

    def run(self, expert: Any, x: Tensor) -> Any:
        return torch.tanh(F.linear(x, expert.inner.weight))


@pattern.model("a mixture of experts, some not chosen, each expert a unit", usual(3, 8))
class Routed(nn.Module):
    def __init__(self, experts: type[Experts] = Experts) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.moe = experts(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.first(x))


pattern("a mixture of experts, the weights of the chosen read by the layer", lambda: Routed(ReadExperts))(
    usual(3, 8), "read_experts"
)


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, WIDTH), Experts(), Experts())


pattern("a mixture of experts, each whole layer a unit, three ranks", _layers, world=3)(
    usual(3, 8), "expert_layers"
)


@pattern.each_step("a mixture of experts with checkpointing", _layers)
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


@pattern.each_step(
    "a head for each task, ranks with different tasks, one head never used", Tasks, steps=VARIED_STEPS
)
def tasks(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data(), (engine.rank + engine.number) % 2)))


@pattern.each_step("sequences and batches of different sizes, some without rows", world=3, steps=VARIED_STEPS)
def sizes(engine: Engine) -> None:
    rows = (engine.rank + engine.number) % 3
    engine.update(engine.model(engine.data(rows, 2 + engine.rank, 8)).square().sum())


@pattern("a loss that one rank computes from features, another from the output")
def different_losses(engine: Engine) -> None:
    taken: list[Tensor] = []
    engine.model.blocks[1].register_forward_hook(lambda module, args, output: taken.append(output))
    for _ in range(STEPS):
        y = engine.model(engine.data())
        engine.update(square(taken.pop() if engine.rank else y))
        taken.clear()


@pattern.each_step("evaluation on rank 0's data only, all ranks calling")
def same_evaluation(engine: Engine) -> None:
    engine.evaluate(torch.ones(1 + 3 * engine.rank, 8))
    engine.train()


@pattern.each_step("a rank that starts no backward in some micro-batches", steps=VARIED_STEPS, **OR_RIGHT)
def fewer_backwards(engine: Engine) -> None:
    with engine.accumulate():
        for micro in range(2):
            loss = engine.loss()
            if (engine.number + micro + engine.rank) % 2:
                engine.backward(loss)
    engine.finish()


@pattern.each_step("a number of backward passes that differs by rank", refused=always(UNEQUAL), **SPLIT)
def more_backward_passes(engine: Engine) -> None:
    for _ in range(1 if engine.plain else engine.rank + 1):
        engine.loss().backward()
    engine.finish()
    engine.record(1)


@pattern.each_step("a number of micro-batches inside `accumulate()` that differs by rank", **AT_STAGE_3)
def more_micro_batches(engine: Engine) -> None:
    with engine.accumulate():
        for _ in range(engine.rank + 1):
            engine.backward(engine.loss())
    engine.train()


@pattern.each_step(
    "ranks whose orders of blocks part in the third step",
    Skips,
    refused={3: Refused("ZerokitError", (), or_right=True)},
    steps=VARIED_STEPS,
    **SPLIT,
)
def orders_later(engine: Engine) -> None:
    places = [2, 0, 1] if engine.number > 1 and engine.rank == 1 else [0, 1, 2]
    engine.update(square(engine.model(engine.data(), places)))


LEFT_OUT = SPLIT | {"refused": always(Refused("ZerokitError", (), everywhere=False)), "steps": VARIED_STEPS}


def _leave_out(engine: Engine, left_out: str) -> None:
    engine.backward(engine.loss())
    leaves = engine.number == 2 and engine.rank == 1 and not engine.plain
    if not (leaves and left_out == "clip"):
        engine.clip(0.1)
    if not (leaves and left_out == "step"):
        engine.step()
    engine.zero_grad()


pattern.each_step("a rank that leaves out clipping once", **LEFT_OUT)(
    lambda engine: _leave_out(engine, "clip"), "left_out_clipping"
)
pattern.each_step("a rank that leaves out `step()` once", **LEFT_OUT)(
    lambda engine: _leave_out(engine, "step"), "left_out_step"
)


@pattern(
    "a rank that takes `model.state_dict()` alone",
    refused={3: Refused("ScheduleError", (), everywhere=False)},
    **SPLIT,
)
def state_alone(engine: Engine) -> None:
    engine.train()
    if engine.rank == 0:
        engine.record(len(engine.model.state_dict()))


@pattern.each_step("a rank that only calls `step()`", **AT_STAGE_3)
def only_steps(engine: Engine) -> None:
    if engine.rank == 0 or engine.number == 0:
        engine.backward(engine.loss())
    engine.finish()


@pattern.each_step("a rank with an extra forward under `no_grad`", **AT_STAGE_3)
def extra_forward(engine: Engine) -> None:
    if engine.number == 1 and engine.rank == 0:
        engine.evaluate()
    engine.train()


@pattern.each_step("a rank that calls the blocks past the model", **AT_STAGE_3)
def past_the_model(engine: Engine) -> None:
    model, x = engine.model, engine.data()
    past = engine.number == 1 and engine.rank == 0
    engine.update(square(model.head(model.features(x)) if past else model(x)))


ROUNDS = 5
"""Two rounds of two steps, and one step of the third."""
EVERY = {"every": 2}
ISLANDS = updates(Engine.loss, 0.1, ROUNDS)
pattern("local steps, with clipping", options=EVERY)(ISLANDS, "clipping")
pattern("local steps on three islands, synchronised in every step", world=3, options={"every": 1})(
    ISLANDS, "every_step"
)


@pattern.each_step(
    "local steps with gradients accumulated inside `accumulate()`", options=EVERY, steps=ROUNDS
)
def accumulated(engine: Engine) -> None:
    with engine.accumulate():
        engine.backward(engine.loss() / 2)
    engine.update(engine.loss() / 2)


@pattern.each_step(
    "local steps, a part of the model frozen and released again between them", options=EVERY, steps=ROUNDS
)
def frozen(engine: Engine) -> None:
    engine.model.blocks.requires_grad_(engine.number % 3 != 1)
    engine.train()


@pattern.each_step("local steps, weights clamped by hand after each", options=EVERY, steps=ROUNDS)
def clamped(engine: Engine) -> None:
    engine.train()
    with engine.gathered(), torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.clamp_(-0.1, 0.1)


@pattern.each_step(
    "local steps of islands that use different blocks, in different orders",
    Skips,
    options=EVERY,
    steps=ROUNDS,
)
def apart(engine: Engine) -> None:
    places = [[0, 2, 1], [1]][engine.rank % 2]
    engine.update(square(engine.model(engine.data(), places)))
