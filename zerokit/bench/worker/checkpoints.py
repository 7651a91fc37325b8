"""Checkpoints of a bench: where it resumes, when it saves, and what both cost. Never inside a timed step.

A checkpoint says how many samples of the job have been trained on, so that a run goes on with the next one at whatever
world size. An elastic bench also keeps a journal (`journal`), since the processes that saw its steps may be gone.

Only a bench that is asked to save imports `zerokit.checkpoint`, which needs zlib-ng, and none imports torch here, since
records are read without.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from zerokit.bench.record import Checkpoints, Save
from zerokit.bench.record.journal import Journal, PartWriter
from zerokit.bench.record.settings import Settings
from zerokit.errors import UsageError

if TYPE_CHECKING:
    from zerokit.checkpoint.background import Saving
    from zerokit.runtime import ZeroOptimizer


@dataclass(frozen=True, slots=True)
class Position:
    """How many steps a run has trained, and on how many samples over all ranks."""

    step: int = 0
    samples: int = 0


class Trained(Protocol):
    """How far a run is, and what this rank has seen since its processes started, a number a step."""

    trained: int
    samples: int
    loss: list[float]
    gradient_norm: list[float]


class Keeper:
    """Saves and resumes one bench's run on this rank; all ranks do the same calls.

    Without an optimizer of zerokit's there is nothing to save, and `Settings` refuses to be asked for it.
    """

    def __init__(self, settings: Settings, optimizer: ZeroOptimizer | None) -> None:
        self._settings = settings
        self._optimizer = optimizer
        self._run = Path(settings.save) if settings.save else None
        self.done = Checkpoints()
        self._last: int | None = None
        self._resumes = settings.resume or settings.elastic
        self._journal: PartWriter | None = None
        self._writing: tuple[Saving, int, float] | None = None
        """A background save, its step, and the milliseconds that training was held for it."""
        self._told = 0

    def resume(self) -> Position:
        """Load the run's newest step, if `resume` is asked for and there is one; returns how far the run is.

        Raises `ZerokitError` where what is to be saved could not be, before any step is made for it.
        """
        if self._run is None or self._optimizer is None:
            return Position()
        try:
            from zerokit.checkpoint.run import check_run, later_steps
        except ModuleNotFoundError as error:
            if error.name != "zlib_ng":
                raise
            raise UsageError(
                "--save needs zlib-ng, which is not installed here: pip install zlib-ng, or bench without --save"
            ) from error

        check_run(self._run, overwrite=True)  # of later steps it says below what can be done here
        begin = self._load_newest()
        if self._settings.elastic:
            self._begin_part(self._run, begin)
        elif later := later_steps(self._run, begin.step):
            begins = f"this bench begins after step {begin.step}"
            advice = (
                "--save to another directory" if self._settings.resume else "--resume, or --save elsewhere"
            )
            raise UsageError(
                f"{self._run} holds step {later[-1]} already, and {begins}: what is saved is never replaced: {advice}"
            )
        return begin

    def _begin_part(self, run: Path, begin: Position) -> None:
        """Note in the journal that these ranks go on from here."""
        import torch.distributed as dist

        journal = Journal(run)
        if begin.step >= self._settings.steps and journal.count() == 0:
            raise UsageError(
                f"{run} holds step {begin.step} already, and an elastic bench ends at step {self._settings.steps}: "
                "give more --steps, or --save elsewhere"
            )
        # None of them has begun a part before all have looked.
        agreed: list[None] = [None] * dist.get_world_size()
        dist.all_gather_object(agreed, None)
        if dist.get_rank() == 0:
            self._journal = journal.begin_part(
                world=self._settings.world,
                nodes=self._settings.nodes,
                step=begin.step,
                samples=begin.samples,
                samples_per_step=self._settings.samples_per_step,
            )

    def _load_newest(self) -> Position:
        if self._run is None or self._optimizer is None:
            return Position()
        if not self._resumes:
            return Position()
        from zerokit.checkpoint.load import load
        from zerokit.checkpoint.run import find_step, list_steps

        if not list_steps(self._run):
            return Position()
        notes = find_step(self._run, whole=True).notes
        self.done.notes = list(notes)
        started = time.perf_counter()
        with warnings.catch_warnings():
            # It warns of them, in a log of the ranks that nobody reads where all goes well.
            warnings.filterwarnings("ignore", re.escape("; ".join(notes)) if notes else "$^")
            extra = load(self._run, self._optimizer)
        if not isinstance(extra, dict) or not isinstance(extra.get("step"), int):
            raise UsageError(f"{self._run}: not saved by zerokit bench, so it cannot be resumed here")
        if not isinstance(extra.get("samples"), int):
            raise UsageError(
                f"{self._run}: saved by a zerokit bench that did not note its place in the data: it cannot be resumed "
                "by this version"
            )
        for name in ("model", "seed", "data"):
            if extra.get(name) != getattr(self._settings, name):
                raise UsageError(
                    f"{self._run} was trained with --{name} {extra.get(name)}, not {getattr(self._settings, name)}: "
                    "resume with the same, or save to another directory"
                )
        self.done.load_ms = (time.perf_counter() - started) * 1000.0
        self.done.resumed_from = self._last = extra["step"]
        return Position(extra["step"], extra["samples"])

    def due(self, trained: int, *, last: bool) -> bool:
        """Whether the number of trained steps, or the end of the bench, asks for a checkpoint that is not there."""
        if self._run is None or self._optimizer is None or self._last == trained:
            return False
        every = self._settings.saves_every
        return last or (every is not None and trained % every == 0)

    def after_step(self, done: Trained, *, last: bool) -> None:
        """Save if `due`; the last one when all is on the disk."""
        if self._journal is not None:
            self._journal.trained(done.trained)
        if last:
            self._settle()
        if self._run is None or self._optimizer is None or not self.due(done.trained, last=last):
            return
        self._note(done)
        trained = done.trained
        from zerokit.checkpoint.save import save

        extra = {name: getattr(self._settings, name) for name in ("model", "seed", "data")} | {
            "step": trained,
            "samples": done.samples,
        }
        started = time.perf_counter()
        # A later step that is there was not gone on from: it is damaged, or nothing led to it yet.
        overwrite = self._settings.elastic
        self._last = trained
        if self._settings.background and not last:
            self._settle()
            saving = save(
                self._run, self._optimizer, step=trained, extra=extra, overwrite=overwrite, blocking=False
            )
            self._writing = saving, trained, (time.perf_counter() - started) * 1000.0
            return
        path = save(self._run, self._optimizer, step=trained, extra=extra, overwrite=overwrite)
        self._add(path, trained, (time.perf_counter() - started) * 1000.0)

    def _settle(self) -> None:
        """Wait for the background save, if there is one."""
        if self._writing is not None:
            saving, step, held_ms = self._writing
            self._writing = None
            self._add(saving.wait(), step, held_ms)

    def _add(self, path: Path, step: int, ms: float) -> None:
        self.done.saves.append(Save(step, ms, sum(file.stat().st_size for file in path.iterdir())))

    def _note(self, done: Trained) -> None:
        """What the steps since the last checkpoint have shown goes into the journal, before the next one is there."""
        if not self._settings.elastic:
            return
        import torch.distributed as dist

        new = done.loss[self._told :]
        gathered = [new] * dist.get_world_size()
        dist.all_gather_object(gathered, new)
        if self._journal is not None:
            first_step = done.trained - len(new) + 1
            self._journal.seen(first_step, mean_over_ranks(gathered), done.gradient_norm[self._told :])
        self._told = len(done.loss)


def mean_over_ranks(losses: Sequence[Sequence[float]]) -> list[float]:
    """Each step's loss over all ranks; `losses` has a list of the same steps a rank."""
    return [sum(step) / len(step) for step in zip(*losses, strict=True)]
