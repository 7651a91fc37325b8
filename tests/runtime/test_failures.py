# mypy: disable-error-code="no-untyped-call"
"""What fails, fails everywhere, soon, by name; what is deleted or collected is gone; groups of any shape."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

import zerokit
from tests.support.distributed import AT_ONCE, ROOT, run_ranks_expecting_errors
from tests.support.machine import live_storages
from tests.support.on_ranks import on_ranks
from tests.support.training import Run, Trajectory, one_step, trained
from zerokit.runtime.collectives.host.node import SWITCH

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


@pytest.mark.full(default=["run0-*", "run3-*", "run4-*"])
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


def _one_rank_is_gone(run: Run) -> None:
    os.environ[SWITCH] = "0"
    case, model, optimizer = trained("gpt", run, 2)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pids[1]).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    time.sleep(0.3)  # gloo's thread learns that the connection is closed
    one_step(model, optimizer, case, run, 2, Trajectory())


@pytest.mark.full(default="run0")
@pytest.mark.parametrize("run", [Run(stage=0), Run(stage=2), Run(stage=2, precision=INT8), Run(stage=3)])
def test_messages_to_a_rank_that_is_gone_are_explained(run: Run) -> None:
    """gloo refuses to post them, where otherwise it lets the rank wait."""
    first, second = run_ranks_expecting_errors(2, _one_rank_is_gone, run, **AT_ONCE)
    assert second.exitcode == -signal.SIGKILL
    assert first.raised("ScheduleError"), first.describe()
    assert "rank 1 failed, stopped, or is busy elsewhere" in first.error


DELETED = [
    ("gpt", False, False),
    ("gpt", True, False),
    ("gpt", False, True),
    ("gpt_checkpoint_each", False, False),
    ("lora", True, False),
]


@on_ranks(2, itertools.product(STAGES, DELETED))
def test_deleting_model_and_optimizer_frees_their_memory(given: tuple[int, tuple[str, bool, bool]]) -> None:
    """In either order, also after an error."""
    stage, (name, optimizer_first, fail) = given
    before = set(live_storages())
    case, model, optimizer = trained(name, Run(stage=stage, clip=1.0), 3)
    if fail:
        handle = _fuse(model, "backward")
        with pytest.raises(Blown):
            one_step(model, optimizer, case, Run(), 3, Trajectory())
        handle.remove()
        optimizer.zero_grad()
    dead: list[weakref.ref[Any]] = [weakref.ref(thing) for thing in (model, optimizer, *model.children())]
    held: list[Any] = [optimizer, model] if optimizer_first else [model, optimizer]
    del model, optimizer
    while held:
        del held[0]
        gc.collect()
    assert [repr(ref())[:80] for ref in dead if ref() is not None] == []
    left = sum(live_storages(before).values())
    assert left <= 1024, f"{left} bytes are still held"


@on_ranks(2)
def test_a_model_may_be_deleted_while_others_still_call_its_parts() -> None:
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
    del model, optimizer, part
    sums: list[Any] = [None, None]
    dist.all_gather_object(sums, x.sum().item())
    assert sums[0] == sums[1]


@on_ranks(2, STAGES)
def test_held_bytes_do_not_grow_with_the_number_of_steps(stage: int) -> None:
    run = Run(stage=stage, clip=1.0)
    before = set(live_storages())
    case, model, optimizer = trained("gpt_checkpoint_each", run)
    held = []
    for step in range(10):
        one_step(model, optimizer, case, run, step, Trajectory())
        if step in (3, 9):
            time.sleep(0.2)  # gloo's thread holds a message's tensor for a moment after the message
            held.append(sum(live_storages(before).values()))
    assert held[1] <= held[0]


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


SCRIPT = """
    import torch, zerokit
    import torch.distributed as dist
    from datetime import timedelta

    dist.init_process_group("gloo", init_method="file://{store}", rank={rank}, world_size=2,
                            timeout=timedelta(seconds=600))
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, lr=1e-2)
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
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # torch 2.6 leaves a folder of its own to Python's exit.
    command = [sys.executable, "-W", "error", "-W", "ignore:Implicitly cleaning up:ResourceWarning", "-c"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, end in enumerate(["dist.destroy_process_group()", "pass"]):
            script = textwrap.dedent(SCRIPT).format(store=tmp_path / "store", rank=rank, end=end)
            process = subprocess.Popen([*command, script], env=environment, **pipes)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in processes:
            out, err = process.communicate(timeout=800)
            assert process.returncode == 0, err
            assert out.startswith("done")
            assert "Traceback" not in err


@on_ranks(2, (1, 2), timeout=60.0)
def test_an_optimizer_collected_on_one_rank_alone_holds_up_nobody(stage: Any) -> None:
    """Rank 0 collects an optimizer that rank 1 still has, which waits in another one's collectives by then."""
    gc.disable()
    first = nn.Linear(64, 64)
    optimizer = zerokit.ZeroOptimizer(first, torch.optim.SGD, stage=stage, lr=0.1)
    optimizer.backward(first(torch.ones(2, 64)).float().sum())
    optimizer.step()
    cycle: list[Any] = [optimizer]
    cycle.append(cycle)
    second = nn.Linear(64, 64)
    other = zerokit.ZeroOptimizer(second, torch.optim.SGD, stage=stage, lr=0.1)
    del optimizer, cycle
    if dist.get_rank() == 0:
        gc.collect()
    other.backward(second(torch.ones(2, 64)).float().sum())
    other.step()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@on_ranks(2, (False, True), timeout=60.0)
def test_groups_of_collected_optimizers_are_destroyed_with_their_threads(
    islands: bool, tmp_path: Path
) -> None:
    threads = []
    where: Any = {"stage": ("local", 2), "mesh": (2, 1)} if islands else {"stage": 2}
    for step in range(4):
        model = nn.Linear(8, 8)
        optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, lr=0.1, **where)
        local = zerokit.LocalSteps(optimizer, every=1) if islands else None
        optimizer.backward(model(torch.ones(2, 8)).float().sum())
        optimizer.step()
        zerokit.save(tmp_path / str(islands), optimizer, step=step)  # over a group of its own
        del model, optimizer, local
        gc.collect()
        threads.append(_threads())
        deadline = time.monotonic() + 20.0
        while threads[-1] > threads[0] and time.monotonic() < deadline:
            time.sleep(0.05)  # a thread that works off tasks ends by itself, when it gets to it
            threads[-1] = _threads()
    assert max(threads) == threads[0], threads  # a group that stays has three threads or more


def _train(group: dist.ProcessGroup | None) -> list[float]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.AdamW, stage=3, precision="fp32", lr=1e-2, process_group=group
    )
    losses = []
    for _ in range(2):
        loss = model(torch.ones(3, 4)).square().sum()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@on_ranks(4, timeout=20.0)
def test_ranks_may_belong_to_different_numbers_of_groups() -> None:
    """Stages {0, 1} and {2, 3} of a pipeline; first and last rank share an embedding, one is in a group by itself."""
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 3), (0,), (0, 1), (2, 3), (1, 2))}
    mine = groups[(0, 1) if rank < 2 else (2, 3)]
    found = [_train(mine), _train(mine)]
    if rank in (1, 2):
        found.append(_train(groups[1, 2]))
    found.append(_train(None))
    assert all(losses == found[0] for losses in found)
