"""The training loop."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.runtime.patterns.engines import STEPS, VARIED_STEPS, Engine
from tests.runtime.patterns.harness import CLIPPED, USUAL, Refused, Subject, always, usage, usual
from tests.runtime.patterns.models import Mlp, Words, chain, square

pattern = Subject(__name__)


pattern("the usual loop, with clipping", Mlp)(CLIPPED, "usual")
pattern("the usual loop on three ranks", Mlp, world=3)(CLIPPED, "three_ranks")


@pattern.each_step("a language model with tied weights and cross entropy", lambda: Words(tied=True))
def language_model(engine: Engine) -> None:
    ids = engine.ids(80, 2, 7)
    engine.update(F.cross_entropy(engine.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


@pattern.each_step("`loss.backward()`", Mlp)
def loss_backward(engine: Engine) -> None:
    engine.zero_grad()
    loss = square(engine.model(engine.data(4, 8)))
    loss.backward()
    engine.step()
    engine.record(loss)


@pattern.each_step("gradients accumulated over micro-batches", Mlp)
def micro_batches(engine: Engine) -> None:
    for _ in range(3):
        loss = square(engine.model(engine.data(4, 8))) / 3
        engine.backward(loss)
        engine.record(loss)
    engine.record(engine.clip(0.1))
    engine.step()
    engine.zero_grad()


@pattern.each_step("gradients accumulated inside `accumulate()`", Mlp)
def accumulate(engine: Engine) -> None:
    with engine.accumulate():
        for _ in range(2):
            loss = square(engine.model(engine.data(4, 8))) / 3
            engine.backward(loss)
            engine.record(loss)
    engine.update(square(engine.model(engine.data(4, 8))) / 3, max_norm=0.1)


@pattern.each_step("every micro-batch inside `accumulate()`, `step()` after it", Mlp)
def accumulate_everything(engine: Engine) -> None:
    with engine.accumulate():
        for _ in range(2):
            loss = square(engine.model(engine.data(4, 8))) / 2
            engine.backward(loss)
            engine.record(loss)
    engine.step()
    engine.zero_grad()


@pattern("a number of micro-batches that changes from step to step", Mlp)
def varying_micro_batches(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        for _ in range(1 + step % 3):
            loss = square(engine.model(engine.data(4, 8)))
            engine.backward(loss)
            engine.record(loss)
        engine.step()
        engine.zero_grad()


@pattern("`step()` inside `accumulate()`", Mlp, refused=always(usage("accumulate()")))
def step_while_accumulating(engine: Engine) -> None:
    with engine.accumulate():
        loss = square(engine.model(engine.data(4, 8)))
        engine.backward(loss)
        engine.record(loss)
        engine.step()


@pattern("clipping inside `accumulate()`", Mlp, refused=always(usage("accumulate()")))
def clip_while_accumulating(engine: Engine) -> None:
    with engine.accumulate():
        loss = square(engine.model(engine.data(4, 8)))
        engine.backward(loss)
        engine.record(loss)
        engine.clip(1.0)


@pattern.each_step("gradients that go on adding up over steps, never cleared", Mlp)
def never_cleared(engine: Engine) -> None:
    loss = square(engine.model(engine.data(4, 8)))
    engine.backward(loss)
    engine.step()
    engine.record(loss)


@pattern("`optimizer.step(closure)`", Mlp)
def closure(engine: Engine) -> None:
    for _ in range(STEPS):
        batch = engine.data(4, 8)

        def run(batch: Tensor = batch) -> Tensor:
            engine.zero_grad()
            loss = square(engine.model(batch))
            engine.backward(loss)
            return loss

        engine.record(engine.closure_step(run))


@pattern.each_step("`optimizer.step(closure)` under `no_grad`", Mlp)
def closure_without_grad(engine: Engine) -> None:
    with torch.no_grad():
        closure(engine)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "lr": 0.01}, {"params": others, "weight_decay": 0.0}]


pattern("parameter groups with their own learning rate and weight decay", Mlp, params=two_groups)(
    USUAL, "groups"
)


pattern(
    "parameters in no group",
    Mlp,
    params=lambda model: [{"params": model.head.parameters()}],
    refused=always(usage("first.weight", "in no group")),
)(USUAL, "in_no_group")


@pattern("a learning rate changed by hand in `param_groups`", Mlp, params=two_groups)
def learning_rate_by_hand(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        engine.update(square(engine.model(engine.data(4, 8))))


@pattern(
    "a learning rate that one rank alone changes",
    Mlp,
    refused=always(Refused("LayoutMismatch", ("param_groups",))),
    apart=True,
)
def learning_rate_of_one_rank(engine: Engine) -> None:
    for step in range(STEPS):
        if step == 1 and engine.rank == 1 and not engine.plain:
            engine.optimizer.param_groups[0]["lr"] *= (
                0.5  # as a scheduler does that follows the rank's own loss
            )
        engine.update(square(engine.model(engine.data(4, 8))))


@pattern("OneCycleLR", Mlp)
def one_cycle(engine: Engine) -> None:
    schedule = lr_scheduler.OneCycleLR(engine.optimizer, max_lr=0.01, total_steps=10)
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.data(4, 8))))
        schedule.step()
        engine.record(engine.optimizer.param_groups[0]["lr"])


@pattern("LambdaLR with a factor for each group", Mlp, params=two_groups)
def lambda_lr(engine: Engine) -> None:
    schedule = lr_scheduler.LambdaLR(engine.optimizer, [lambda step: 1 / (step + 1), lambda step: 1.0])
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.data(4, 8))))
        schedule.step()


@pattern("ReduceLROnPlateau", Mlp)
def plateau(engine: Engine) -> None:
    schedule = lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
    for step in range(VARIED_STEPS):
        engine.update(square(engine.model(engine.data(4, 8))))
        schedule.step(float(step))


@pattern.each_step("several losses summed", Mlp)
def summed_losses(engine: Engine) -> None:
    y = engine.model(engine.data(4, 8))
    engine.update(square(y) + 0.1 * y.abs().mean() + y[:, 0].mean())


@pattern.each_step("two losses of one graph, a backward each (`retain_graph`)", Mlp)
def two_losses(engine: Engine) -> None:
    y = engine.model(engine.data(4, 8))
    one, two = square(y), y.abs().mean()
    one.backward(retain_graph=True)
    two.backward()
    engine.record(one + two)
    engine.step()
    engine.zero_grad()


@pattern.each_step("the same loss differentiated twice", Mlp)
def same_loss_twice(engine: Engine) -> None:
    loss = square(engine.model(engine.data(4, 8)))
    loss.backward(retain_graph=True)
    engine.update(loss)


@pattern.each_step("an output differentiated with a gradient of its own (`y.backward(v)`)", Mlp)
def vector_backward(engine: Engine) -> None:
    y = engine.model(engine.data(4, 8))
    y.backward(y.detach() / y.numel())
    engine.record(y.detach().sum())
    engine.step()
    engine.zero_grad()


@pattern.each_step("evaluation between forward and backward", Mlp)
def evaluation_between(engine: Engine) -> None:
    loss = square(engine.model(engine.data(4, 8)))
    engine.model.eval()
    with torch.no_grad():
        engine.record(square(engine.model(engine.data(3, 8))))
    engine.model.train()
    engine.update(loss)


@pattern.each_step("evaluation after every step, under `inference_mode`", Mlp)
def inference_mode(engine: Engine) -> None:
    with torch.inference_mode():
        engine.record(square(engine.model(engine.data(3, 8))))
    engine.update(square(engine.model(engine.data(4, 8))))


@pattern.each_step("forwards with gradients that are dropped", Mlp)
def dropped_forward(engine: Engine) -> None:
    engine.record(square(engine.model(engine.data(4, 8))))
    engine.update(square(engine.model(engine.data(4, 8))))
    engine.record(square(engine.model(engine.data(4, 8))))


@pattern("a loss times zero, on another rank at each step", Mlp)
def zero_loss(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        loss = square(engine.model(engine.data(4, 8)))
        engine.update(loss * 0.0 if step % engine.world == engine.rank else loss)


class Failing(Mlp):
    """Raises in the middle of a forward or a backward when told to."""

    where = ""

    def features(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        if self.where == "forward":
            raise ArithmeticError("in forward")
        x = self.blocks[1](x)
        if self.where == "backward":
            x.register_hook(_raise)
        return self.blocks[2](x)  # type: ignore[no-any-return]


def _raise(gradient: Tensor) -> None:
    raise ArithmeticError("in backward")


def _failing_step(engine: Engine, where: str) -> None:
    engine.model.where = where
    try:
        engine.backward(square(engine.model(engine.data(4, 8))))
    except ArithmeticError:
        engine.record(1.0)
    engine.model.where = ""


@pattern.each_step("an exception in forward, caught", Failing)
def exception_in_forward(engine: Engine) -> None:
    _failing_step(engine, "forward")
    engine.update(square(engine.model(engine.data(4, 8))))


@pattern.each_step("an exception in forward under `no_grad`, caught", Failing)
def exception_in_evaluation(engine: Engine) -> None:
    with torch.no_grad():
        _failing_step(engine, "forward")
    engine.update(square(engine.model(engine.data(4, 8))))


@pattern.each_step("an exception in the first backward, caught, then an ordinary step", Failing)
def exception_in_backward(engine: Engine) -> None:
    _failing_step(engine, "backward")
    if engine.plain:
        engine.zero_grad()  # torch keeps what a failed pass has left; zerokit drops it
    engine.update(square(engine.model(engine.data(4, 8))))


@pattern.each_step(
    "an exception in the second micro-batch's backward, then `step()`",
    Failing,
    refused=always(Refused("ScheduleError", ("zero_grad()",))),
)
def exception_in_second_backward(engine: Engine) -> None:
    engine.backward(square(engine.model(engine.data(4, 8))))
    _failing_step(engine, "backward")
    engine.step()


@pattern.each_step("an exception in a backward inside `accumulate()`, `zero_grad()`, a new attempt", Failing)
def attempt_while_accumulating(engine: Engine) -> None:
    with engine.accumulate():
        engine.backward(square(engine.model(engine.data(4, 8))))
        _failing_step(engine, "backward")
    engine.zero_grad()
    engine.update(square(engine.model(engine.data(4, 8))))


@pattern.each_step("an exception in the second micro-batch's backward, `zero_grad()`, a new attempt", Failing)
def second_attempt(engine: Engine) -> None:
    engine.backward(square(engine.model(engine.data(4, 8))))
    _failing_step(engine, "backward")
    engine.zero_grad()
    engine.update(square(engine.model(engine.data(4, 8))))


pattern("only a Sequential", chain)(usual(4, 64, max_norm=0.1), "sequential")


@pattern.each_step("autocast around the forward", Mlp)
def autocast(engine: Engine) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = engine.model(engine.data(4, 8))
    engine.update(square(y))


@pattern.each_step(
    "two forwards in one autocast, a loss of both: equal bits", Mlp, reference="stage 0", tolerance=0.0
)
def autocast_twice(engine: Engine) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = square(engine.model(engine.data(4, 8))) + square(engine.model(engine.data(4, 8)))
    engine.update(loss)


@pattern("two models in one autocast: equal bits", Mlp, reference="stage 0", tolerance=0.0)
def autocast_of_two(engine: Engine) -> None:
    other = engine.another(Mlp())
    for _ in range(STEPS):
        x = engine.data(4, 8)
        with torch.autocast("cpu", torch.bfloat16):
            loss = square(engine.model(x) - other.model(x)) + square(engine.model(2 * x))
        engine.record(loss)
        engine.backward(loss)
        for one in (engine, other):
            one.step()
            one.zero_grad()


@pattern.each_step("autocast, its first forward under `no_grad`", Mlp)
def autocast_evaluates_first(engine: Engine) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            engine.record(square(engine.model(engine.data(4, 8))))
        y = engine.model(engine.data(4, 8))
    engine.update(square(y))
