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
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from zerokit.errors import UsageError
from zerokit.runtime.optimizer import ZeroOptimizer
from zerokit.training.arguments import islands_of, require_zero_optimizer
from zerokit.training.exchange import Exchange
from zerokit.workers import taking

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

    `srun` passes signals on to the ranks, so `#SBATCH --signal=USR1@300` works. `torchrun` passes SIGTERM on, and kills
    the ranks 30 s later; SIGUSR1 ends torchrun itself unless its `--signals-to-handle` names it.

    Clusters send the signal to a rank's workers, too. Workers of data loaders, `multiprocessing` pools, executors and
    managers, and other daemonic children of `multiprocessing`, ignore it while the context is entered, so that the rank
    gets its next batch and reaches its save. They may be forked or spawned before or inside the context, if zerokit was
    imported before they started; a spawned worker imports it with the main module. `terminate()`, called by the rank
    itself, still ends workers. Programs that workers start with `subprocess` have these signals blocked: end them with
    `kill()`. Other processes that a rank forks inside the context are ended by SIGTERM and ignore the other signals.

    Args:
        optimizer: its ranks agree on the step, those of all islands too.
        minutes_before: a stop is requested this long before the deadline: time for the last steps and the save.
        deadline: seconds since 1970; by default Slurm's SLURM_JOB_END_TIME, if it is set.
        signals: are handled while the context is entered; their former handlers are restored after it. A second
            signal changes nothing. Only the main thread can take signals.

    Raises:
        UsageError: for times that are no numbers, or outside the main thread.
    """

    def __init__(
        self,
        optimizer: ZeroOptimizer,
        *,
        minutes_before: float = 5.0,
        deadline: float | None = None,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
    ) -> None:
        require_zero_optimizer(optimizer, "StopSignal(optimizer)")
        if not 0 <= minutes_before < math.inf:
            raise UsageError(f"minutes_before={minutes_before!r}: expected a number of at least 0")
        self.deadline = _deadline(deadline)
        """Seconds since 1970; None without a deadline."""
        self.reason = ""
        """Why to stop, the same on every rank: such as "SIGTERM on rank 1"; "" until `requested` returns True."""
        self._minutes_before = minutes_before
        self._collectives, self._islands = optimizer.runtime.collectives, islands_of(optimizer)
        where = self._islands or self._collectives
        self._rank, self._world = where.rank, where.world
        self._group: dist.ProcessGroup | None = None
        self._exchange: Exchange | None = None
        self._signals = tuple(map(signal.Signals, signals))
        self._handling = ExitStack()
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
        if self._signals:
            self._handling.enter_context(taking(self._signals, self._note))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        self._handling.close()

    def requested(self) -> bool:
        """Whether to stop now; the answer is equal on every rank. Collective: all ranks call it after the same steps.

        It costs one message of 8 bytes, in which the ranks' processes wait for each other; devices go on.
        """
        if not self._entered:
            raise UsageError(
                "requested() outside the context: write `with zerokit.StopSignal(optimizer) as stop:`"
            )
        if self.reason:
            return True
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


def _deadline(given: float | None) -> float | None:
    name, value = ("deadline", given) if given is not None else (END_TIME, os.environ.get(END_TIME) or None)
    try:
        seconds = None if value is None else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if seconds is not None and math.isnan(seconds):
        raise UsageError(f"{name}={value!r}: expected seconds since 1970")
    return seconds
