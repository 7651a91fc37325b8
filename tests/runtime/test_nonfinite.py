"""Inf and nan in one rank's gradients: at every precision, stage and wire they reach no weight, state or average."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.support.distributed import run_ranks_expecting_errors
from tests.support.on_ranks import on_ranks
from tests.support.streams import LaggingStream, device_way
from tests.support.training import Run, digest, trained
from zerokit.errors import NonFiniteError, UsageError, ZerokitWarning

STAGES = (0, 1, 2, 3)
PRECISIONS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "bf16 sums": zerokit.Precision("bf16", "bf16"),
    "bf16 masters": zerokit.Precision("bf16", "bf16", "bf16"),
    "bf16 wire": zerokit.Precision(wire="bf16"),
    "int8 wire": zerokit.Precision(wire="int8"),
    "int4 wire": zerokit.Precision("bf16", wire="int4"),
}


class Loop:
    """Training of a small model, in whose bad steps one rank's loss is `bad`."""

    def __init__(self, run: Run, **options: Any) -> None:
        self.case, self.model, self.optimizer = trained("mlp_10_64_2", run, **options)
        self.run, self.number = run, 0

    def differentiate(self, *bad: float) -> None:
        loss = self.case.loss(self.model, self.case.batch(0, self.number, dist.get_rank()))
        self.optimizer.backward(loss * math.prod(bad) if dist.get_rank() == 1 else loss)

    def step(self, *bad: float) -> None:
        self.differentiate(*bad)
        if self.run.clip is not None:
            self.optimizer.clip_grad_norm_(self.run.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += not bad

    def bits(self) -> str:
        """A digest of this rank's masters, their optimizer states and the whole weights."""
        state = self.optimizer.state_dict()
        kept = [
            (f"{index} {kind}", torch.as_tensor(value))
            for index, held in sorted(state["inner"]["state"].items())
            for kind, value in sorted(held.items())
        ]
        masters = [(f"master {number}", master) for number, master in enumerate(state["masters"])]
        return digest([*kept, *masters, *self.model.state_dict().items()])


@contextlib.contextmanager
def said(*, often: int = 1) -> Iterator[None]:
    """Inside, the first skipped step is warned of, and no other."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert len(caught) == often, [str(one.message) for one in caught]
    assert all("this step was skipped" in str(one.message) for one in caught)


def quietly() -> warnings.catch_warnings[None]:
    return warnings.catch_warnings(action="ignore", category=ZerokitWarning)


@on_ranks(2, itertools.product(PRECISIONS, STAGES))
def test_one_ranks_inf_changes_no_bit_of_weights_and_states(given: tuple[str, int]) -> None:
    """Clipped and not; the losses that follow are those of a training without such steps."""
    name, stage = given
    for clip, bad in ((None, math.inf), (1.0, math.nan)):
        run = Run(stage=stage, precision=PRECISIONS[name], clip=clip)
        scale = {"loss_scale": zerokit.LossScale(2.0**10)} if name == "fp16" else {}
        loop, clean = Loop(run, **scale), Loop(run, **scale)
        with said(often=0 if name == "fp16" else 1):
            loop.step(bad)
            for _ in range(2):
                loop.step()
                clean.step()
            before = loop.bits()
            loop.step(-bad)
            loop.step(bad)
            assert loop.bits() == before
        assert loop.optimizer.skipped_steps == 3
        loop.step()
        clean.step()
        if "int" not in name:  # whose draws count reductions
            assert loop.bits() == clean.bits()
        assert loop.bits() != before
        assert clean.optimizer.skipped_steps == 0


@on_ranks(2, itertools.product(PRECISIONS, STAGES))
def test_a_lone_element_is_found_whichever_it_is(given: tuple[str, int]) -> None:
    """The first and the last of a weight, in one rank's gradients of one micro-batch of two."""
    name, stage = given
    scale = {"loss_scale": zerokit.LossScale(2.0**10)} if name == "fp16" else {}
    loop = Loop(Run(stage=stage, precision=PRECISIONS[name]), **scale)
    loop.step()
    before = loop.bits()
    parameters = list(loop.model.parameters())
    with quietly():
        for parameter, at, bad in ((parameters[0], 0, math.inf), (parameters[-1], -1, math.nan)):

            def spoil(gradient: Tensor, at: int = at, bad: float = bad) -> Tensor:
                changed = gradient.clone()
                changed.view(-1)[at] = bad
                return changed

            hook = parameter.register_hook(spoil) if dist.get_rank() == 1 else None
            loop.differentiate()
            if hook is not None:
                hook.remove()
            loop.differentiate()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert (loop.optimizer.skipped_steps, loop.bits()) == (2, before)


@on_ranks(4, [((1, 3), "bf16"), ((0, 2), "fp32"), ((2, 2), "int8 wire"), ((3, 3), "bf16")])
def test_on_a_mesh(given: tuple[Any, str]) -> None:
    stages, name = given
    loop = Loop(Run(stage=stages, mesh=(2, 2), precision=PRECISIONS[name]))
    loop.step()
    before = loop.bits()
    with said():
        loop.step(math.inf)
    assert loop.bits() == before
    assert loop.optimizer.skipped_steps == 1


@on_ranks(2, ("bf16", "int8 wire"))
def test_where_modules_have_stages_of_their_own(name: str) -> None:
    loop = Loop(Run(stage={"0": 3, "*": 1}, precision=PRECISIONS[name]))
    loop.step()
    before = loop.bits()
    with said():
        loop.step(math.inf)
    assert (loop.optimizer.skipped_steps, loop.bits()) == (1, before)


@on_ranks(2, itertools.product(STAGES, (None, 1.0)))
def test_a_look_at_the_gradients_costs_no_message(given: tuple[int, float | None]) -> None:
    stage, clip = given
    found = []
    for choice in ("skip", "ignore"):
        loop = Loop(Run(stage=stage, clip=clip), on_nonfinite=choice)
        for _ in range(3):
            loop.step()
        found.append((loop.bits(), loop.optimizer.traffic()))
    assert found[0] == found[1]


@on_ranks(2, itertools.product(("fp32", "bf16"), STAGES, (None, 1.0)))
def test_raise_is_an_error_on_all_ranks_before_anything_changes(given: tuple[str, int, float | None]) -> None:
    precision, stage, clip = given
    run = Run(stage=stage, precision=precision, clip=clip)
    loop, clean = (Loop(run, on_nonfinite="raise") for _ in range(2))
    loop.step()
    clean.step()
    before = loop.bits()
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="nothing was updated"):
            loop.step(math.inf)
        with pytest.raises(NonFiniteError, match="nothing was updated"):
            loop.optimizer.step()
        assert loop.bits() == before
        loop.optimizer.zero_grad()
    loop.step()
    clean.step()
    assert loop.bits() == clean.bits()
    assert loop.optimizer.skipped_steps == 0


@on_ranks(2, STAGES)
def test_ignore_writes_them_into_the_weights(stage: int) -> None:
    loop = Loop(Run(stage=stage), on_nonfinite="ignore")
    loop.step(math.nan)
    assert not all(bool(value.isfinite().all()) for value in loop.model.state_dict().values())
    assert loop.optimizer.skipped_steps == 0


@on_ranks(2, (1, 3))
def test_what_a_norm_has_shown_holds_for_those_gradients_alone(stage: int) -> None:
    """`loss.backward()` brings others after `clip_grad_norm_()`, with and without `zero_grad()`."""
    loop = Loop(Run(stage=stage, clip=1.0))
    loop.step()
    before = loop.bits()
    with said():
        for drops in (True, False):
            loop.differentiate()
            loop.optimizer.clip_grad_norm_(1.0)
            if drops:
                loop.optimizer.zero_grad()
            loss = loop.case.loss(loop.model, loop.case.batch(0, 7, dist.get_rank()))
            (loss * math.nan).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert (loop.optimizer.skipped_steps, loop.bits()) == (2, before)


@on_ranks(2, itertools.product(("fp32", "fp16"), (0, 3)))
def test_what_is_changed_in_gathered_gradients_is_looked_at(given: tuple[str, int]) -> None:
    precision, stage = given
    loop = Loop(Run(stage=stage, precision=precision), loss_scale=zerokit.LossScale(2.0**10))
    loop.step()
    before = loop.bits()
    with quietly():
        for clip in (False, True):
            loop.differentiate()
            if clip:
                loop.optimizer.clip_grad_norm_(1.0)
            with loop.optimizer.gathered_gradients():
                gradients = [p.grad for p in loop.model.parameters() if p.grad is not None]
                gradients[0].view(-1)[0] = math.nan
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert (loop.optimizer.skipped_steps, loop.bits()) == (2, before)
    loop.differentiate(math.inf)
    with loop.optimizer.gathered_gradients():
        for parameter in loop.model.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
    loop.optimizer.step()
    # In fp16 the loss scale was too large all the same.
    assert (loop.optimizer.skipped_steps == 3, loop.bits() == before) == ((precision == "fp16",) * 2)


@on_ranks(2, STAGES)
def test_what_a_skipped_step_has_left_in_frozen_parameters_is_not_looked_at(stage: int) -> None:
    """A part of a unit, then all of it, is frozen after the step; and gradients are cleared one by one."""
    loop = Loop(Run(stage=stage))
    first = next(iter(loop.model.children()))
    with said():
        loop.step(math.nan)
    for parameter in first.parameters():
        parameter.requires_grad_(False)
        before = loop.bits()
        loop.step()
        assert loop.bits() != before
    first.requires_grad_(True)
    loop.differentiate(math.inf)
    for parameter in loop.model.parameters():
        parameter.grad = None
    loop.step()
    assert loop.optimizer.skipped_steps == 1


@on_ranks(2, itertools.product((1, 3), (False, True)))
def test_micro_batches_and_counts(given: tuple[int, bool]) -> None:
    stage, accumulates = given
    loop = Loop(Run(stage=stage))
    loop.step()
    before = loop.bits()
    batch = loop.case.batch(0, 1, dist.get_rank())
    with said():
        for bad in (math.nan, 1.0):
            with loop.optimizer.accumulate() if accumulates else contextlib.nullcontext():
                loop.optimizer.backward(loop.case.loss(loop.model, batch) * bad, count=3)
            loop.optimizer.backward(loop.case.loss(loop.model, batch) / bad, count=2)
            loop.optimizer.step()
            assert loop.optimizer.last_count == 10
            assert (loop.bits() == before) is math.isnan(bad)
            loop.optimizer.zero_grad()
    assert loop.optimizer.skipped_steps == 1


@on_ranks(2, (0, 3))
def test_an_average_stays_after_a_skipped_step(stage: int) -> None:
    loop = Loop(Run(stage=stage))
    ema = zerokit.Ema(loop.optimizer, decay=0.5)
    for _ in range(2):
        loop.step()
        ema.update()
    before = loop.bits()
    with said():
        for _ in range(3):
            loop.step(math.inf)
            ema.update()
    assert loop.bits() == before
    loop.step()
    ema.update()
    assert loop.bits() != before


@on_ranks(4, (0, 3))
def test_an_island_leaves_out_a_step_by_itself_and_meets_the_others(stage: int) -> None:
    """Islands count the skipped step: they synchronise when all have been called equally often."""
    options: dict[str, Any] = {"mesh": (2, 2), "stage": ("local", stage), "precision": "fp32"}
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, lr=0.1, **options)
    local = zerokit.LocalSteps(optimizer, every=3)
    island = dist.get_rank() // 2
    for step in range(6):
        loss = model(torch.full((2, 8), 1.0 + dist.get_rank())).square().mean()
        bad = step in (1, 5) and dist.get_rank() == 3
        with said() if step == 1 and island else contextlib.nullcontext():
            optimizer.backward(loss * math.inf if bad else loss)
            optimizer.step()
        optimizer.zero_grad()
    assert (optimizer.skipped_steps, local.steps) == (2 * island, 6)
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, digest(model.state_dict().items()))
    assert len(set(everyone)) == 1
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())


@on_ranks(2, (2, 3))
def test_the_count_goes_into_the_state(stage: int) -> None:
    loop, other = Loop(Run(stage=stage)), Loop(Run(stage=stage))
    with said():
        loop.step(math.nan)
    other.optimizer.load_state_dict(loop.optimizer.state_dict())
    assert other.optimizer.skipped_steps == 1
    other.step(math.nan)  # the first one was warned of
    assert other.optimizer.skipped_steps == 2


# ---- on a device, where the host does not wait

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.01, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "dampened": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.1}),
}
WAITING = {"rmsprop", "dampened"}
if not getattr(
    torch.optim.Adagrad([nn.Parameter(torch.ones(1))], fused=True), "_step_supports_amp_scaling", False
):
    WAITING.add("adagrad")  # torch 2.11's kernel


class Direct(Loop):
    """The loop with an optimizer class of one's own choice."""

    def __init__(self, name: str, stage: Any, clip: float | None, **options: Any) -> None:
        cls, defaults = OPTIMIZERS[name]
        super().__init__(Run(stage=stage, clip=clip))
        zerokit.release(self.model)
        torch.manual_seed(0)
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.1)
        self.optimizer = zerokit.ZeroOptimizer(
            self.model, cls, stage=stage, precision="fp32", bucket_mb=1e-6, **defaults | options
        )


@on_ranks(2, [(name, stage, clip) for name in OPTIMIZERS for stage, clip in ((1, None), (3, 1.0), (2, None))])
def test_a_device_leaves_steps_out_by_itself(given: tuple[str, int, float | None]) -> None:
    """Also the very first one; optimizers without such a kernel make the host wait, and say so."""
    name, stage, clip = given
    waits = name in WAITING
    with device_way(LaggingStream):
        says = pytest.warns(ZerokitWarning, match="the host waits") if waits else contextlib.nullcontext()
        with says:
            loop = Direct(name, stage, clip)
        clean = Direct(name, stage, clip, on_nonfinite="ignore")
        ema = zerokit.Ema(loop.optimizer, decay=0.5)
        clean_ema = zerokit.Ema(clean.optimizer, decay=0.5)
        with said():
            loop.step(math.inf)
            assert loop.optimizer.skipped_steps == waits
            for _ in range(2):
                for one, average in ((loop, ema), (clean, clean_ema)):
                    one.step()
                    average.update()
            before = loop.bits()
            assert before == clean.bits()
            for _ in range(2):
                loop.step(math.nan)
                ema.update()
            assert loop.optimizer.skipped_steps == 2 + waits
            assert loop.bits() == before
        assert loop.optimizer.skipped_steps == 3
        for one, average in ((loop, ema), (clean, clean_ema)):
            one.step()
            average.update()
        assert loop.bits() == clean.bits()


@on_ranks(2, itertools.product(("bf16", "fp32"), (1, 3), (None, 1.0)))
def test_a_device_raises_before_anything_changes(given: tuple[str, int, float | None]) -> None:
    precision, stage, clip = given
    with device_way(LaggingStream):
        loop = Loop(Run(stage=stage, precision=precision, clip=clip), on_nonfinite="raise")
        loop.step()
        before = loop.bits()
        with pytest.raises(NonFiniteError, match="nothing was updated"):
            loop.step(math.inf)
        assert loop.bits() == before
        loop.optimizer.zero_grad()
        loop.step()
        assert loop.bits() != before


@on_ranks(2, itertools.product((1, 3), ("skip", "ignore")))
def test_a_device_leaves_out_a_step_without_tokens(given: tuple[int, Any]) -> None:
    """Whether a rank knows its count or has it on the device: all ranks make the same collectives."""
    stage, choice = given
    with device_way(LaggingStream):
        loop = Loop(Run(stage=stage), on_nonfinite=choice)
        loop.step()
        before = loop.bits()
        counts: list[Any] = [torch.tensor(0), 0] if dist.get_rank() else [0, 0]
        for count in counts:
            loss = loop.case.loss(loop.model, loop.case.batch(0, 1, dist.get_rank()))
            loop.optimizer.backward(loss * 0.0, count=count)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        assert loop.bits() == before
        assert loop.optimizer.skipped_steps == 2
        loop.step()
        assert loop.bits() != before


# ---- what is refused


@on_ranks(1)
def test_another_word_is_refused() -> None:
    with pytest.raises(UsageError, match="on_nonfinite='warn': expected 'skip'"):
        Loop(Run(), on_nonfinite="warn")


def _apart() -> None:
    Loop(Run(), on_nonfinite=("skip", "raise")[dist.get_rank()])


def test_ranks_that_differ_are_told_so() -> None:
    for outcome in run_ranks_expecting_errors(2, _apart):
        assert outcome.raised("LayoutMismatch")
        assert "rank 1: on_nonfinite is raise, not skip" in outcome.error
