"""The training loop, and parts of it in threads."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.runtime.patterns.engines import STEPS, VARIED_STEPS, Engine
from tests.runtime.patterns.harness import CLIPPED, USUAL, Refused, Subject, always, usage, usual
from tests.runtime.patterns.models import Mlp, Words, chain, square
from zerokit.errors import ZerokitWarning

pattern = Subject(__name__)

pattern("the usual loop, with clipping")(CLIPPED, "usual")
pattern("the usual loop on three ranks", world=3)(CLIPPED, "three_ranks")
pattern("only a Sequential", chain)(usual(4, 64, max_norm=0.1), "sequential")


@pattern.each_step("a language model with tied weights and cross entropy", lambda: Words(tied=True))
def language_model(engine: Engine) -> None:
    ids = engine.ids(80, 2, 7)
    engine.update(F.cross_entropy(engine.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


@pattern.each_step(
    "`loss.backward()`, and an output differentiated with a gradient of its own (`y.backward(v)`)"
)
def loss_backward(engine: Engine) -> None:
    engine.zero_grad()
    engine.loss().backward()
    y = engine.model(engine.data())
    y.backward(y.detach() / y.numel())
    engine.step()
    engine.record(y.sum())


@pattern.each_step("two losses of one graph, a backward each, one of them twice (`retain_graph`)")
def two_losses(engine: Engine) -> None:
    y = engine.model(engine.data())
    square(y).backward(retain_graph=True)
    loss = y.abs().mean()
    loss.backward(retain_graph=True)
    engine.update(loss)


@pattern.each_step("a loss times zero, on another rank at each step", steps=VARIED_STEPS)
def zero_loss(engine: Engine) -> None:
    engine.update(engine.loss() * float(engine.number % engine.world != engine.rank))


@pattern.each_step("a number of micro-batches that changes from step to step", steps=VARIED_STEPS)
def varying_micro_batches(engine: Engine) -> None:
    for _ in range(engine.number % 3):
        engine.backward(engine.loss())
    engine.update(engine.loss(), max_norm=0.1)


@pattern.each_step(
    "losses that are sums over unequal numbers of samples, with their `count`, clipped at times"
)
def counted(engine: Engine) -> None:
    counts = [(1, 5, 0, 7)[(engine.number + rank) % 4] for rank in range(engine.world)]
    own = counts[engine.rank]
    loss = engine.model(engine.data(8, 8)[:own]).square().sum()
    if engine.plain:
        engine.backward(loss * engine.world / sum(counts))
    else:
        engine.optimizer.backward(loss, count=own)
        engine.record(loss * engine.world / sum(counts))
    if engine.number % 2:
        engine.clip(0.1)
    engine.finish()


@pattern.each_step(
    "inf or nan in one rank's gradients at times, in steps that are skipped", steps=VARIED_STEPS
)
def nonfinite(engine: Engine) -> None:
    factor = (1.0, math.inf, math.nan, 1.0)[engine.number]
    loss = engine.loss()
    engine.record(loss)
    if not engine.plain:
        engine.optimizer.backward(loss * (factor if engine.rank == engine.number % engine.world else 1.0))
    elif factor == 1.0:
        loss.backward()
    with warnings.catch_warnings(action="ignore", category=ZerokitWarning):  # of the first
        if factor == 1.0 or not engine.plain:
            engine.step()
    engine.zero_grad()


@pattern.each_step("micro-batches inside `accumulate()`, the last one after it or inside as well")
def accumulate(engine: Engine) -> None:
    with engine.accumulate():
        for _ in range(2):
            engine.backward(engine.loss() / 3)
    if engine.number % 2:
        engine.backward(engine.loss() / 3)
    engine.clip(0.1)
    engine.finish()


ACCUMULATING = always(usage("accumulate()"))


@pattern("`step()` inside `accumulate()`", refused=ACCUMULATING)
def step_while_accumulating(engine: Engine) -> None:
    with engine.accumulate():
        engine.train()


@pattern("clipping inside `accumulate()`", refused=ACCUMULATING)
def clip_while_accumulating(engine: Engine) -> None:
    with engine.accumulate():
        engine.update(engine.loss(), 1.0)


@pattern.each_step("`step()` twice with the same gradients")
def steps_twice(engine: Engine) -> None:
    engine.backward(engine.loss())
    engine.step()
    engine.finish()


@pattern.each_step("gradients that go on adding up over steps, never cleared")
def never_cleared(engine: Engine) -> None:
    engine.backward(engine.loss())
    engine.step()


@pattern.each_step("`optimizer.step(closure)`, at times under `no_grad`")
def closure(engine: Engine) -> None:
    batch = engine.data()

    def run() -> Tensor:
        engine.zero_grad()
        loss = square(engine.model(batch))
        engine.backward(loss)
        return loss

    with torch.set_grad_enabled(engine.number % 2 == 0):
        engine.record(engine.closure_step(run))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "lr": 0.01}, {"params": others, "weight_decay": 0.0}]


pattern("parameter groups with their own learning rate and weight decay", params=two_groups)(USUAL, "groups")
pattern(
    "parameters in no group",
    params=lambda model: [{"params": model.head.parameters()}],
    refused=always(usage("first.weight", "in no group")),
)(USUAL, "in_no_group")


@pattern.each_step("learning rates changed by hand in `param_groups`", params=two_groups, steps=VARIED_STEPS)
def learning_rate_by_hand(engine: Engine) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.01 / (engine.number + 1)
    engine.train()


@pattern.each_step(
    "a learning rate that one rank alone changes",
    refused=always(Refused("LayoutMismatch", ("param_groups",))),
    apart=True,
)
def learning_rate_of_one_rank(engine: Engine) -> None:
    if engine.number == 1 and engine.rank == 1 and not engine.plain:
        # As a scheduler does that follows the rank's own loss.
        engine.optimizer.param_groups[0]["lr"] *= 0.5
    engine.train()


@pattern("OneCycleLR, LambdaLR with a factor for each group, ReduceLROnPlateau", params=two_groups)
def schedulers(engine: Engine) -> None:
    one_cycle: Any = lr_scheduler.OneCycleLR(engine.optimizer, max_lr=0.01, total_steps=10)
    by_group: Any = lr_scheduler.LambdaLR(engine.optimizer, [lambda step: 1 / (step + 1), lambda step: 1.0])
    plateau: Any = lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
    for schedule in (one_cycle, by_group, plateau):
        for _ in range(2):
            engine.train()
            schedule.step(*[1.0] * (schedule is plateau))  # its metric
            engine.record(engine.optimizer.param_groups[0]["lr"])


@pattern.each_step(
    "evaluation between forward and backward, and under `inference_mode`; a forward that is dropped"
)
def evaluated(engine: Engine) -> None:
    loss = engine.loss()
    engine.model.eval()
    engine.evaluate(engine.data(3, 8))
    engine.model.train()
    engine.update(loss)
    with torch.inference_mode():
        engine.record(engine.loss(3, 8))
    engine.train()
    engine.record(engine.loss())


class Failing(Mlp):
    """Raises in the middle of a forward or a backward when told to."""

    where = ""

    def features(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        if self.where == "forward":
            _raise(x)
        x = self.blocks[1](x)
        if self.where == "backward":
            x.register_hook(_raise)
        return self.blocks[2](x)  # type: ignore[no-any-return]


def _raise(tensor: Tensor) -> None:
    raise ArithmeticError


def _fail(engine: Engine, where: str) -> None:
    engine.model.where = where
    try:
        engine.backward(engine.loss())
    except ArithmeticError:
        engine.record(1.0)
    engine.model.where = ""


@pattern.each_step("an exception in forward, at times under `no_grad`, caught", Failing, steps=VARIED_STEPS)
def exception_in_forward(engine: Engine) -> None:
    with torch.set_grad_enabled(engine.number % 2 == 0):
        _fail(engine, "forward")
    engine.train()


@pattern.each_step("an exception in the first backward, caught, then an ordinary step", Failing)
def exception_in_backward(engine: Engine) -> None:
    _fail(engine, "backward")
    if engine.plain:
        engine.zero_grad()  # torch keeps what a failed pass has left; zerokit drops it
    engine.train()


@pattern.each_step(
    "an exception in the second micro-batch's backward, then `step()`",
    Failing,
    refused=always(Refused("ScheduleError", ("zero_grad()",))),
)
def exception_in_second_backward(engine: Engine) -> None:
    engine.backward(engine.loss())
    _fail(engine, "backward")
    engine.step()


@pattern.each_step(
    "an exception in the second micro-batch's backward, `zero_grad()`, a new attempt; at times in `accumulate()`",
    Failing,
    steps=VARIED_STEPS,
)
def second_attempt(engine: Engine) -> None:
    with engine.accumulate() if engine.number % 2 else nullcontext():
        engine.backward(engine.loss())
        _fail(engine, "backward")
    engine.zero_grad()
    engine.train()


@pattern.each_step("autocast around the forward")
def autocast(engine: Engine) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = engine.model(engine.data())
    engine.update(square(y))


@pattern("two models in one autocast, two forwards of one: equal bits", reference="stage 0", tolerance=0.0)
def autocast_of_two(engine: Engine) -> None:
    other = engine.another(Mlp())
    for _ in range(STEPS):
        x = engine.data()
        with torch.autocast("cpu", torch.bfloat16):
            loss = square(engine.model(x) - other.model(x)) + square(engine.model(2 * x))
        engine.backward(loss)
        engine.finish()
        other.finish()


@pattern.each_step("autocast, its first forward under `no_grad`")
def autocast_evaluates_first(engine: Engine) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        engine.evaluate(engine.data())
        y = engine.model(engine.data())
    engine.update(square(y))


def _apart(step: Callable[[Engine, Any], None]) -> Callable[[Engine], None]:
    """Steps with a thread that works off what it is given."""

    def train(engine: Engine) -> None:
        with ThreadPoolExecutor(1) as pool:
            for _ in range(STEPS):
                step(engine, lambda *call: pool.submit(*call).result())

    return train


def _step_aside(engine: Engine, elsewhere: Any) -> None:
    engine.backward(engine.loss())
    elsewhere(engine.step)
    engine.zero_grad()


def _backward(engine: Engine, elsewhere: Any) -> None:
    elsewhere(engine.backward, engine.loss())
    engine.finish()


def _state(engine: Engine, elsewhere: Any) -> None:
    engine.train()
    weights = elsewhere(engine.model.state_dict)
    engine.record(torch.stack([value.abs().sum() for value in weights.values()]).sum())


pattern("backward in a thread of its own")(_apart(_backward), "backward_in_thread")
pattern("forward in a thread, all else in the main one")(
    _apart(lambda engine, elsewhere: engine.update(square(elsewhere(engine.model, engine.data())))),
    "forward_in_thread",
)
pattern("`step()` in a thread")(_apart(_step_aside), "step_in_thread")
pattern("`state_dict()` in a thread")(_apart(_state), "state_in_thread")


@pattern("the whole loop in a thread")
def loop_in_thread(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(USUAL, engine).result()
