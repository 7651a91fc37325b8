"""`StopSignal`: whichever rank a signal reaches, all of them stop at the same step."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.on_ranks import on_ranks
from zerokit import StopSignal, UsageError

FAR = 1 << 40
"""Seconds since 1970: nobody will see it."""


def _optimizer(stage: Any = 2, **options: Any) -> tuple[nn.Module, zerokit.ZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return model, zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, precision="fp32", **options)


def _step(model: nn.Module, optimizer: zerokit.ZeroOptimizer) -> None:
    optimizer.backward(model(torch.ones(2, 8)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1

CASES: dict[str, tuple[list[tuple[int, int, int]], int, str]] = {
    "one": ([(1, 3, TERM)], 3, "SIGTERM on rank 1"),
    "the other": ([(0, 5, USR1)], 5, "SIGUSR1 on rank 0"),
    "both": ([(0, 4, TERM), (1, 4, TERM)], 4, "SIGTERM on rank 1"),
    "one after the other": ([(0, 2, TERM), (1, 3, TERM), (1, 3, TERM)], 2, "SIGTERM on rank 0"),
    "again and again": ([(1, 2, TERM), (1, 2, TERM), (0, 2, TERM)], 2, "SIGTERM on rank 1"),
    "islands": ([(0, 3, USR1), (1, 3, TERM)], 3, "SIGTERM on rank 1"),
}
"""By name: the signals (rank, step, number), the step at which both ranks must stop, and why."""


@on_ranks(2, CASES)
def test_ranks_stop_at_the_same_step_and_go_on_from_it(name: str, tmp_path: Path) -> None:
    hits, last, reason = CASES[name]
    run = tmp_path / name
    options: dict[str, Any] = {"stage": ("local", 3), "mesh": (2, 1)} if name == "islands" else {"stage": 3}

    def build() -> tuple[nn.Module, zerokit.ZeroOptimizer]:
        made = _optimizer(**options)
        if name == "islands":
            zerokit.LocalSteps(made[1], every=5)
        return made

    model, optimizer = build()
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal(optimizer) as stop:
        for step in range(1, 31):
            _step(model, optimizer)
            for rank, when, number in hits:
                if (rank, when) == (dist.get_rank(), step):
                    os.kill(os.getpid(), number)
            if stop.requested():
                zerokit.save(run, optimizer, step=step)
                assert stop.requested()
                break
    assert signal.getsignal(signal.SIGTERM) is before
    _, optimizer = build()
    zerokit.load(run, optimizer)
    saved = zerokit.Checkpoint(run / "island-0" if name == "islands" else run)
    assert (step, stop.reason, saved.step) == (last, reason, last)


@on_ranks(2, [(1,), (0,), (0, 1), (1, 0)])
def test_a_signal_may_come_at_any_moment(targets: tuple[int, ...]) -> None:
    """A thread of rank 0 signals processes at a moment that no step knows of."""
    model, optimizer = _optimizer(0)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    under_way = threading.Event()

    def send() -> None:
        under_way.wait()
        for target in targets:
            os.kill(pids[target], signal.SIGTERM)

    with StopSignal(optimizer) as stop:
        sender = threading.Thread(target=send if dist.get_rank() == 0 else under_way.wait, daemon=True)
        sender.start()
        step = 0
        while not stop.requested():
            _step(model, optimizer)
            step += 1
            if step == 3:
                under_way.set()
        sender.join()
        dist.barrier()  # the last signal has come before the handlers go
    assert step >= 3
    assert stop.reason in {f"SIGTERM on rank {rank}" for rank in targets}
    said: list[Any] = [None, None]
    dist.all_gather_object(said, (step, stop.reason))
    assert said[0] == said[1]


@on_ranks(1)
def test_handlers_are_had_back_and_other_signals_are_left_alone() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, or in the background, both come ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _, optimizer = _optimizer()

    def mine(*_: object) -> None: ...

    signal.signal(signal.SIGTERM, mine)
    with StopSignal(optimizer, signals=(signal.SIGHUP, signal.SIGTERM)) as stop:
        assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(UsageError, match="entered already"):
            stop.__enter__()
    with pytest.raises(RuntimeError, match="the loop's own"), StopSignal(optimizer):
        raise RuntimeError("the loop's own")
    assert signal.getsignal(signal.SIGTERM) is mine
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    with pytest.raises(UsageError, match="outside the context"):
        stop.requested()


@on_ranks(1, (signal.SIGTERM, signal.SIGUSR1))
def test_forked_workers_can_be_ended_and_are_not_by_other_signals(number: int) -> None:
    _, optimizer = _optimizer()
    with StopSignal(optimizer) as stop:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, {number})
            os.write(writing, b"x")
            while number not in signal.sigpending():
                time.sleep(0.01)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            os._exit(7)
        os.read(reading, 1)
        os.kill(child, number)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert ended == (-signal.SIGTERM if number == signal.SIGTERM else 7)
        assert not stop.requested()


@on_ranks(1)
def test_another_thread_has_the_deadline_alone() -> None:
    _, optimizer = _optimizer()

    def enter(*signals: int) -> bool:
        with StopSignal(optimizer, signals=signals, deadline=0) as stop:
            return stop.requested()

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(UsageError, match=r"pass signals=\(\)"):
            pool.submit(enter, signal.SIGTERM).result()
        assert pool.submit(enter).result()


DEADLINES: list[tuple[list[float | None], str | None, float, int | None]] = [
    ([None, None], None, 5.0, None),
    ([FAR, FAR], None, 5.0, None),
    ([FAR, FAR], None, FAR / 60, 1),
    ([FAR, 1.0], None, 5.0, 1),  # clocks differ: whoever is first
    ([1.0, FAR], None, 0.0, 0),
    ([None, None], "100", 5.0, 1),
    ([None, None], str(FAR), 5.0, None),
    ([FAR, FAR], "100", 5.0, None),  # what was given counts
]
"""Each rank's deadline, Slurm's, the minutes before it, and by which rank's clock to stop."""


@on_ranks(2, DEADLINES)
def test_deadlines(given: tuple[list[float | None], str | None, float, int | None]) -> None:
    deadlines, slurm, minutes, rank = given
    model, optimizer = _optimizer(3)
    os.environ.pop("SLURM_JOB_END_TIME", None)
    if slurm is not None:
        os.environ["SLURM_JOB_END_TIME"] = slurm
    made = 0
    with StopSignal(optimizer, deadline=deadlines[dist.get_rank()], minutes_before=minutes) as stop:
        while made < 3 and not stop.requested():
            _step(model, optimizer)
            made += 1
    reason = f"{minutes:g} minutes before the deadline, by the clock of rank {rank}"
    assert (made, stop.reason) == ((3, "") if rank is None else (0, reason))


@on_ranks(2)
def test_a_deadline_comes() -> None:
    """The clock passes the moment while training: no bound on when, only that it is seen afterwards."""
    _, optimizer = _optimizer()
    moments = [time.time() + 60.3]
    dist.broadcast_object_list(moments)
    with StopSignal(optimizer, minutes_before=1, deadline=moments[0]) as stop:
        while not stop.requested():
            time.sleep(0.01)
        assert time.time() >= moments[0] - 60


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"minutes_before": -1}, "minutes_before=-1"),
    ({"minutes_before": float("nan")}, "minutes_before=nan"),
    ({"deadline": "tomorrow"}, "deadline='tomorrow'"),
    ({"deadline": float("nan")}, "deadline=nan"),
]


@on_ranks(1)
def test_impossible_arguments() -> None:
    _, optimizer = _optimizer()
    for options, start in ARGUMENTS:
        with pytest.raises(UsageError, match=f"^{re.escape(start)}"):
            StopSignal(optimizer, **options)
    os.environ["SLURM_JOB_END_TIME"] = "soon"
    with pytest.raises(UsageError, match=r"^SLURM_JOB_END_TIME='soon'"):
        StopSignal(optimizer)
    with pytest.raises(UsageError, match=r"^the first argument is a AdamW"):
        StopSignal(optimizer.runtime.inner)  # type: ignore[arg-type]
