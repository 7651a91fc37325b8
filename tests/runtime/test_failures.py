# mypy: disable-error-code="no-untyped-call"
"""What fails, fails everywhere, soon, by name; what is deleted is gone."""

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
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

import zerokit
from tests.support.distributed import AT_ONCE, ROOT, run_each, run_ranks, run_ranks_expecting_errors
from tests.support.machine import live_storages
from tests.support.training import Run, Trajectory, digest, one_step, trained, whole_weights
from zerokit.runtime.collectives.node import SWITCH

STAGES = (0, 1, 2, 3)
SQUARE = (2, 2)
INT8 = zerokit.Precision(wire="int8")


class Blown(Exception):
    """Raised by a fuse."""


def _blow(how: str, *_: object) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise Blown(how)


def _fuse(model: nn.Module, how: str) -> RemovableHandle:
    """The second block ends its rank in forward or backward, or raises there."""
    block = model.get_submodule("blocks.1")
    register = block.register_full_backward_pre_hook if how == "backward" else block.register_forward_pre_hook
    return register(partial(_blow, how))


def _one_rank_ends(run: Run, how: str, switch: str) -> None:
    os.environ[SWITCH] = switch
    case, model, optimizer = trained("gpt", run, 2)
    if dist.get_rank() == 1:
        _fuse(model, how)
    for step in range(2, 4):
        one_step(model, optimizer, case, replace(run, clip=1.0), step, Trajectory())


@pytest.mark.parametrize(
    ("run", "world", "how", "switch"),
    [
        (Run(stage=0), 3, "forward", "1"),
        (Run(stage=1), 3, "backward", "1"),
        (Run(stage=3), 3, "forward", "1"),
        (Run(stage=3), 3, "backward", "1"),
        (Run(stage=0), 3, "killed", "1"),
        (Run(stage=3), 3, "killed", "1"),
        (Run(stage=(0, 3), mesh=SQUARE), 4, "killed", "1"),
        (Run(stage=(2, 2), mesh=SQUARE), 4, "killed", "1"),
        (Run(stage=2, precision=INT8), 2, "killed", "1"),
        (Run(stage=2, precision=INT8), 2, "killed", "0"),
    ],
)
def test_a_rank_that_ends_is_named_by_others_which_end_too(
    run: Run, world: int, how: str, switch: str
) -> None:
    """A rank that is killed closes its connections, so two find that at once; else within the time-out."""
    limit = AT_ONCE if run.precision is INT8 else {"timeout": 3.0}
    first, second, *others = run_ranks_expecting_errors(world, _one_rank_ends, run, how, switch, **limit)
    assert second.exitcode == -signal.SIGKILL if how == "killed" else second.raised("Blown"), (
        second.describe()
    )
    for outcome in (first, *others):
        assert outcome.raised("ScheduleError"), outcome.describe()
    assert any("rank 1" in outcome.error for outcome in (first, *others))


def _slow_rank(stage: int) -> str:
    """One rank takes longer than the watch's second, not longer than the time-out: nothing happens."""
    case, model, optimizer = trained("mlp_10_64_2", Run(stage=stage))
    for step in range(3):
        if step == 1 and dist.get_rank() == 1:
            time.sleep(2.0)
        one_step(model, optimizer, case, Run(), step, Trajectory())
    return digest(whole_weights(model).items())


def test_a_slow_rank_is_waited_for() -> None:
    for first, second in run_each(2, _slow_rank, (0, 3), timeout=10.0):
        assert first == second


# --- memory that must be free again ------------------------------------------------------------------------


def _delete(stage: int, name: str, order: str, fail: bool) -> dict[str, Any]:
    before = set(live_storages())
    case, model, optimizer = trained(name, Run(stage=stage, clip=1.0), 3)
    if fail:
        handle = _fuse(model, "backward")
        with pytest.raises(Blown):
            one_step(model, optimizer, case, Run(), 3, Trajectory())
        handle.remove()
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


def _call_parts_and_delete() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.SGD, stage=3, precision="fp32", bucket_mb=0.01, lr=0.1
    )
    x = torch.ones(2, 64)
    optimizer.backward(model(x).sum())
    optimizer.step()
    if dist.get_rank() == 1:
        model[0].register_forward_hook(lambda *_: time.sleep(0.5))
    with torch.no_grad():
        for part in model:
            x = part(x)
    return x.sum().item()


def test_a_model_may_be_deleted_while_others_still_call_its_parts() -> None:
    first, second = run_ranks(2, _call_parts_and_delete)
    assert first == second


def _many_steps(stage: int) -> tuple[int, int, int]:
    """Bytes held after few steps and after many, and threads left over once everything is deleted."""
    run = Run(stage=stage, clip=1.0)
    threads = threading.active_count()
    before = set(live_storages())
    case, model, optimizer = trained("gpt_checkpoint_each", run)
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
