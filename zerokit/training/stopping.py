"""Stop signals: training stops after a signal on any rank or at the job's deadline, on all ranks together.

Clusters end jobs by a signal and, some seconds later, by force; when and in which ranks the signal arrives is not
known. So a handler only takes note of it, and once a step all ranks learn the greatest note of any.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from zerokit.errors import UsageError
from zerokit.runtime.optimizer import ZeroOptimizer
from zerokit.training.arguments import require_zero_optimizer
from zerokit.training.exchange import Exchange

END_TIME = "SLURM_JOB_END_TIME"
"""Where Slurm (22.05 and later) states when the job will be ended, in seconds since 1970."""

_DEADLINE = 1 << 10
"""A note of the deadline: greater than any signal's number."""


class StopSignal:
    """A context manager that tells all ranks, at the same step, to save and stop.

        with zerokit.StopSignal(optimizer, minutes_before=5) as stop:
            for step in range(done, steps):
                train(step)
                if stop.requested():
                    zerokit.save("run", optimizer, step=step + 1)
                    break

    `srun` passes signals on to the ranks, so `#SBATCH --signal=USR1@300` does; `torchrun` passes SIGTERM on and kills
    30 s later, and SIGUSR1 would end it itself: there the deadline is the better way. Processes that a rank forks
    inside, such as data loaders' workers, are ended by SIGTERM as ever, and let the other signals pass.

    Args:
        optimizer: its ranks agree, those of all islands too.
        minutes_before: the deadline that much earlier asks for a stop: time for the last steps and the save.
        deadline: seconds since 1970, or a `datetime`; by default Slurm's SLURM_JOB_END_TIME, if it is set.
        signals: are handled while the context is entered; their former handlers are restored after it. A second
            signal changes nothing. Only the main thread can take signals.
        every: ask the other ranks at every so many calls of `requested`. It costs one message of 8 bytes, in which the
            ranks' processes wait for each other; devices go on.

    Raises:
        UsageError: for arguments that do not exist, a SLURM_JOB_END_TIME that is no number, or outside the main thread.
    """

    def __init__(
        self,
        optimizer: ZeroOptimizer,
        *,
        minutes_before: float = 5.0,
        deadline: float | datetime | None = None,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        every: int = 1,
    ) -> None:
        require_zero_optimizer(optimizer, "StopSignal(optimizer)")
        if not 0 <= minutes_before < math.inf:
            raise UsageError(f"minutes_before={minutes_before!r}: expected a number of at least 0")
        if type(every) is not int or every < 1:
            raise UsageError(f"every={every!r}: expected an integer of at least 1")
        self.deadline = _deadline(deadline, os.environ)
        """Seconds since 1970; None without a deadline."""
        self.reason = ""
        """Why to stop, the same on every rank: such as "SIGTERM on rank 1"; "" until `requested` returns True."""
        self._minutes_before = minutes_before
        self._every, self._calls = every, 0
        self._collectives, self._islands = optimizer.runtime.collectives, optimizer.islands
        where = self._islands or self._collectives
        self._rank, self._world = where.rank, where.world
        self._group: dist.ProcessGroup | None = None
        self._exchange: Exchange | None = None
        self._signals = tuple(map(_signal, signals))
        self._former: dict[signal.Signals, Any] = {}
        self._noted = 0
        self._process = os.getpid()
        self._entered = False

    def __enter__(self) -> StopSignal:
        if self._entered:
            raise UsageError("this StopSignal is entered already: make another one")
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "StopSignal outside the main thread, which alone receives signals: enter it there, or pass "
                "signals=() to use only the deadline"
            )
        self._entered, self._process = True, os.getpid()
        for number in self._signals:
            self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        while self._former:
            number, former = self._former.popitem()
            # A handler that was not installed from Python is None here, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if former is None else former)

    def requested(self) -> bool:
        """Whether to stop now; the answer is equal on every rank. Collective: all ranks call it once per step."""
        if not self._entered:
            raise UsageError(
                "requested() outside the context: write `with zerokit.StopSignal(optimizer) as stop:`"
            )
        if self.reason:
            return True
        self._calls += 1
        if self._calls % self._every:
            return False
        self.reason = self._describe(self._agree(self._mine()))
        return bool(self.reason)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._noted = max(self._noted, number)
        elif number == signal.SIGTERM:
            # A fork of the rank, such as a data loader's worker: `terminate()` must be able to end it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _mine(self) -> int:
        """What this rank knows: 0, a signal's number or the deadline."""
        if self._noted or self.deadline is None:
            return self._noted
        return _DEADLINE if time.time() >= self.deadline - 60.0 * self._minutes_before else 0

    def _agree(self, note: int) -> int:
        """The greatest of all ranks' notes, with its rank: `note * world + rank`; 0 where there is none."""
        collectives, call = self._collectives, "StopSignal.requested(), which all ranks call once a step"
        notes = torch.tensor([note * self._world + self._rank if note else 0])
        if collectives.world > 1:
            if self._group is None:  # once: whether a group is still good, all ranks must agree on
                self._group = collectives.side_group("StopSignal")
            with collectives.reporter.waiting(call):
                dist.all_reduce(notes, op=dist.ReduceOp.MAX, group=self._group)
        agreed = int(notes.item())
        if self._islands is None:
            return agreed
        if self._exchange is None:
            self._exchange = Exchange(self._islands)
        return max(self._exchange.all(call, agreed))

    def _describe(self, agreed: int) -> str:
        note, rank = divmod(agreed, self._world)
        if not note:
            return ""
        if note == _DEADLINE:
            return f"{self._minutes_before:g} minutes before the deadline, by the clock of rank {rank}"
        return f"{signal.Signals(note).name} on rank {rank}"


def _deadline(given: float | datetime | None, environment: Mapping[str, str]) -> float | None:
    if isinstance(given, datetime):
        return given.timestamp()
    if given is not None:
        try:
            seconds = float(given)
        except (TypeError, ValueError):
            seconds = math.nan
        if math.isnan(seconds):
            raise UsageError(f"deadline={given!r}: expected seconds since 1970, or a datetime")
        return seconds
    text = environment.get(END_TIME, "")
    if text and not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{END_TIME}={text!r}: expected seconds since 1970; give deadline=, or unset it")
    return float(text) if text else None


def _signal(number: int) -> signal.Signals:
    try:
        signal_given = signal.Signals(number)
    except ValueError:
        raise UsageError(f"signals: {number!r} is not a signal of this system") from None
    if signal_given in (signal.SIGKILL, signal.SIGSTOP):
        raise UsageError(f"signals: {signal_given.name} cannot be handled by any process")
    return signal_given
