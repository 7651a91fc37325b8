# mypy: disable-error-code="no-untyped-call"
"""What fails, fails everywhere, soon, by name; what is caught leaves no trace; what is deleted is gone."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.support.distributed import ROOT, run_each, run_ranks, run_ranks_expecting_errors
from tests.support.machine import live_storages
from tests.support.models import CASES, Case
from tests.support.models.transformers import Block, Gpt
from tests.support.training import Run, Trajectory, build_seeded, digest, exact, one_step, whole_weights, wrap
from zerokit.placement import stage_of

STAGES = (0, 1, 2, 3)


class Blown(Exception):
    """Raised by a fuse."""


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fused: FusedBlock) -> Tensor:
        ctx.fused = fused
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.fused.blows == "backward":
            raise Blown("in backward")
        return gradients[0], None


class FusedBlock(Block):
    """A block that raises in the middle of its forward or backward when told to."""

    blows = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.blows == "forward":
            raise Blown("in forward")
        x = x + self.attention(self.norm1(x))
        x = _Fuse.apply(x, self)
        if self.blows == "end of forward":
            raise Blown("at the end of forward")
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


def _fused_gpt() -> Gpt:
    torch.manual_seed(3)
    model = Gpt(depth=0)
    model.blocks = nn.ModuleList(FusedBlock() for _ in range(3))
    return model


def _attempt(model: Gpt, optimizer: zerokit.ZeroOptimizer, case: Case, place: str, block: int) -> None:
    """One step that raises at `place`, caught as a user would."""
    fused = model.blocks[block]
    assert isinstance(fused, FusedBlock)
    if place in ("forward", "end of forward", "backward", "accumulate"):
        fused.blows = "backward" if place == "accumulate" else place
    loss = case.loss(model, case.batch(0, 77, dist.get_rank())) if place != "forward" else None
    if place == "between":
        raise Blown("between forward and backward")
    if place == "after backward":
        assert loss is not None
        optimizer.backward(loss)
        raise Blown("after backward")
    if place == "accumulate":
        assert loss is not None
        with optimizer.accumulate():
            optimizer.backward(loss)
    elif loss is not None:
        optimizer.backward(loss)
    else:
        case.loss(model, case.batch(0, 77, dist.get_rank()))


IN_BLOCKS = ("forward", "end of forward", "backward", "accumulate")
OUTSIDE = ("between", "after backward")


def _with_exceptions(stage: int, first: bool) -> list[tuple[str, list[str]]]:
    """A few steps each, with one exception at each place (before the first or the third step), or none.

    The block that raises is one of two by turns: a place has both in two stages.
    """
    found = []
    case = CASES["gpt"]
    places = [(place, (stage // 2 + turn) % 2 + (1 if first else 0)) for turn, place in enumerate(IN_BLOCKS)]
    for place, block in [("", 0), *places, *((place, 0) for place in OUTSIDE)]:
        model = _fused_gpt()
        optimizer = wrap(model, case, Run(stage=stage))
        trajectory = Trajectory()
        for step in range(3 if first else 4):
            if place and step == (0 if first else 2):
                with pytest.raises(Blown):
                    _attempt(model, optimizer, case, place, block)
                for fused in model.blocks:
                    assert isinstance(fused, FusedBlock)
                    fused.blows = ""
                optimizer.zero_grad()
            one_step(model, optimizer, case, Run(clip=1.0), step, trajectory)
        trajectory.weights = digest(whole_weights(model).items())
        found.append((f"{place!r} of block {block}", trajectory.bits()))
    return found


@pytest.mark.parametrize(("stage", "first"), [(0, True), (1, False), (2, True), (3, True), (3, False)])
def test_an_exception_on_every_rank_leaves_no_trace(stage: int, first: bool) -> None:
    for found in run_ranks(2, _with_exceptions, stage, first):
        (_, expected), *others = found
        for place, bits in others:
            assert bits == expected, f"an exception in {place} changed later steps"


def _one_rank_raises(stage: int, place: str, first: bool) -> None:
    case = CASES["gpt"]
    model = _fused_gpt()
    optimizer = wrap(model, case, Run(stage=stage))
    if not first:
        one_step(model, optimizer, case, Run(), 0, Trajectory())
        one_step(model, optimizer, case, Run(), 1, Trajectory())
    if dist.get_rank() == 1:
        _attempt(model, optimizer, case, place, 1)
    for step in range(2, 4):
        one_step(model, optimizer, case, Run(clip=1.0), step, Trajectory())


@pytest.mark.parametrize(
    ("stage", "place"), [(0, "forward"), (1, "backward"), (3, "forward"), (3, "backward")]
)
def test_an_exception_on_one_rank_ends_the_others_within_the_time_out(stage: int, place: str) -> None:
    first, second, third = run_ranks_expecting_errors(3, _one_rank_raises, stage, place, False, timeout=2.0)
    assert second.raised("Blown"), second.describe()
    for outcome in (first, third):
        assert outcome.raised("ScheduleError"), outcome.describe()
    # The rank that is gone is named by at least one of those that waited for it.
    assert "rank 1" in first.error + third.error


def _killed(stage: int) -> None:
    case = CASES["gpt"]
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, Run(stage=stage))
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        one_step(model, optimizer, case, Run(), step, Trajectory())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_killed_rank_ends_the_others(stage: int) -> None:
    first, second, third = run_ranks_expecting_errors(3, _killed, stage, timeout=3.0)
    assert second.exitcode == -signal.SIGKILL
    for outcome in (first, third):
        assert outcome.raised("ScheduleError"), outcome.describe()


def _slow_rank(stage: int) -> str:
    """One rank takes longer than the watch's second, not longer than the time-out: nothing happens."""
    case = CASES["mlp_10_64_2"]
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, Run(stage=stage))
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            time.sleep(2.0)
        one_step(model, optimizer, case, Run(), step, Trajectory())
    return digest(whole_weights(model).items())


def test_a_slow_rank_is_waited_for() -> None:
    for first, second in run_each(2, _slow_rank, (0, 3), timeout=10.0):
        assert first == second


# --- ranks that take different paths -----------------------------------------------------------------------


class Turned(nn.Module):
    """Blocks in line order on rank 0, in another order on rank 1, from step `since` on."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.stem = nn.Linear(9, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 1)
        self.since, self.calls = since, 0

    def forward(self, x: Tensor) -> Tensor:
        turned = dist.get_rank() == 1 and self.calls >= self.since
        self.calls += 1
        x = self.stem(x)
        for index in (2, 0, 3, 1) if turned else (0, 1, 2, 3):
            x = self.blocks[index](x).tanh()
        return self.head(x)  # type: ignore[no-any-return]


def _turned(stage: int, since: int) -> tuple[list[str], str]:
    case = CASES["unit_called_twice"]
    torch.manual_seed(9)
    model = Turned(since)
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage_of(stage), precision="fp32", bucket_mb=1e-6, lr=1e-2
    )
    losses = []
    for step in range(4):
        batch = case.batch(0, step, dist.get_rank())
        loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(exact(loss))
    return losses, digest(whole_weights(model).items())


@pytest.mark.parametrize(("stage", "since"), [(2, 2), (3, 2)])
def test_another_order_of_units_on_one_rank_is_right_or_an_error_but_no_hang(stage: int, since: int) -> None:
    outcomes = run_ranks_expecting_errors(2, _turned, stage, since, timeout=2.0)
    if all(outcome.ok for outcome in outcomes):
        expected = run_ranks(2, _turned, 0, since)
        assert [outcome.value for outcome in outcomes] == expected
    else:
        for outcome in outcomes:
            assert outcome.raised("ZerokitError"), outcome.describe()


def _skips_a_step(stage: int, what: str) -> None:
    """Rank 1 leaves out one call that is collective."""
    case = CASES["gpt"]
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, Run(stage=stage))
    odd = dist.get_rank() == 1
    for step in range(4):
        skip = odd and step == 2
        loss = case.loss(model, case.batch(0, step, dist.get_rank()))
        if not (skip and what == "backward"):
            optimizer.backward(loss)
        if not (skip and what == "clip"):
            optimizer.clip_grad_norm_(1.0)
        if not (skip and what == "step"):
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("what", "stage"), [("clip", 0), ("step", 3), ("clip", 3)])
def test_a_call_left_out_on_one_rank_is_an_error_and_no_hang(what: str, stage: int) -> None:
    outcomes = run_ranks_expecting_errors(2, _skips_a_step, stage, what, timeout=2.0)
    assert any(outcome.raised("ZerokitError") for outcome in outcomes), [o.describe() for o in outcomes]
    for outcome in outcomes:
        assert outcome.ok or outcome.raised("ZerokitError"), outcome.describe()


# --- memory that must be free again ------------------------------------------------------------------------


def _delete(stage: int, name: str, order: str, fail: bool) -> dict[str, Any]:
    before = set(live_storages())
    case, run = CASES[name], Run(stage=stage)
    model = _fused_gpt() if fail else build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    for step in range(3):
        one_step(model, optimizer, case, Run(clip=1.0), step, Trajectory())
    if fail:
        assert isinstance(model, Gpt)
        with pytest.raises(Blown):
            _attempt(model, optimizer, case, "backward", 1)
        optimizer.zero_grad()
    dead: list[weakref.ref[Any]] = [weakref.ref(thing) for thing in (model, optimizer, *model.children())]
    if order == "model first":
        del model
        gc.collect()
        del optimizer
    else:
        del optimizer
        gc.collect()
        del model
    gc.collect()
    alive = [repr(ref())[:80] for ref in dead if ref() is not None]
    return {"alive": alive, "bytes": sum(live_storages(before).values())}


def _delete_each(stage: int) -> dict[str, dict[str, Any]]:
    return {
        f"{name}, {order}, {'after an error' if fail else 'as usual'}": _delete(stage, name, order, fail)
        for name, order, fail in (
            ("gpt", "model first", False),
            ("gpt", "optimizer first", False),
            ("gpt", "model first", True),
            ("gpt_checkpoint_each", "model first", False),
            ("lora", "optimizer first", False),
        )
    }


@pytest.mark.parametrize("stage", STAGES)
def test_deleting_model_and_optimizer_frees_their_memory(stage: int) -> None:
    for each in run_ranks(2, _delete_each, stage):
        for what, found in each.items():
            assert found["alive"] == [], what
            assert found["bytes"] <= 1024, f"{what}: {found['bytes']} bytes are still held"


def _many_steps(stage: int) -> tuple[int, int, int]:
    """Bytes held after few steps and after many, and threads left over once everything is deleted."""
    case, run = CASES["gpt_checkpoint_each"], Run(stage=stage, clip=1.0)
    threads = threading.active_count()
    before = set(live_storages())
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    held = []
    for step in range(10):
        one_step(model, optimizer, case, run, step, Trajectory())
        if step in (3, 9):
            time.sleep(0.2)  # gloo's thread holds a message's tensor for a moment after the message
            held.append(sum(live_storages(before).values()))
    del model, optimizer
    gc.collect()
    until = time.monotonic() + 5.0
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.05)
    return held[0], held[1], threading.active_count() - threads


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_grows_with_the_number_of_steps(stage: int) -> None:
    for few, many, threads in run_ranks(2, _many_steps, stage):
        assert many <= few
        assert threads == 0


def _own_timeout() -> None:
    model = nn.Linear(4, 1)
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.SGD, precision="fp32", timeout=timedelta(seconds=2), lr=0.1
    )
    if dist.get_rank() == 1:
        raise Blown("before the step")
    optimizer.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()


def test_a_time_out_of_its_own() -> None:
    """`timeout=` wins over the process group's."""
    first, second = run_ranks_expecting_errors(2, _own_timeout, timeout=300.0)
    assert second.raised("Blown")
    assert first.raised("ScheduleError"), first.describe()


# --- the user's own script ---------------------------------------------------------------------------------

SCRIPT = """
    import torch, zerokit
    import torch.distributed as dist
    from datetime import timedelta

    dist.init_process_group("gloo", init_method="file://{store}", rank={rank}, world_size=2,
                            timeout=timedelta(seconds=30))
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage={stage}, lr=1e-2)
    for step in range(3):
        loss = model(torch.ones(4, 6)).float().square().mean()
        optimizer.backward(loss)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    print("done", loss.item())
    {end}
"""


def test_a_script_ends_cleanly_with_warnings_as_errors(tmp_path: Path) -> None:
    """With and without destroy_process_group: no warning, no abort at exit, nothing on stderr but torch's own."""
    ends = ["dist.destroy_process_group()", "pass"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-W",
                        "error",
                        "-W",  # torch 2.6 leaves a folder of its own to Python's exit
                        "ignore:Implicitly cleaning up:ResourceWarning",
                        "-c",
                        textwrap.dedent(SCRIPT).format(store=tmp_path / "store", rank=rank, stage=3, end=end),
                    ],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank, end in enumerate(ends)
        ]
        for process in processes:
            stack.callback(process.kill)
        for process in processes:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert out.startswith("done")
            assert "Traceback" not in err
