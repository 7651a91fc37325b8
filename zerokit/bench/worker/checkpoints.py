"""Checkpoints of a bench: resuming, saving, and their cost. Never inside a timed step.

A checkpoint says how many samples of the job have been trained on, so that a run goes on with the next one at whatever
world size. An elastic bench also keeps a journal (`journal`), since the processes that saw its steps may be gone.

Only a bench that saves imports `zerokit.checkpoint`, which needs zlib-ng.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zerokit.bench.machine.accelerator import gather
from zerokit.bench.record.journal import Journal, Part, Where, note
from zerokit.bench.record.measured import Checkpoints, Save
from zerokit.bench.record.settings import Settings
from zerokit.bench.worker.measured import Measured
from zerokit.bench.worker.memory import MARK, Memory, noted
from zerokit.errors import UsageError
from zerokit.files import path_of

if TYPE_CHECKING:
    from zerokit.checkpoint.together import Saving
    from zerokit.runtime import ZeroOptimizer

_IDENTITY = ("model", "seed", "data")
"""Settings that a run has from its beginning to its end."""


@dataclass(frozen=True, slots=True)
class Position:
    """The number of steps that a run has trained, and of samples over all ranks."""

    step: int = 0
    samples: int = 0
    where: Where = ""


class Keeper:
    """Saves and resumes one bench's run on this rank; all ranks make the same calls.

    Without an optimizer of zerokit's there is nothing to save: `Settings` refuses `save` for other engines. `memory` is
    the directory of the job's copies in the node's memory; None for none.
    """

    def __init__(
        self, settings: Settings, optimizer: ZeroOptimizer | None, memory: Path | None = None
    ) -> None:
        self._settings = settings
        self._target = (
            (path_of(settings.save), optimizer) if settings.save and optimizer is not None else None
        )
        self.done = Checkpoints()
        self._memory = (
            None
            if memory is None or optimizer is None
            else Memory(memory, settings, optimizer, self.done.notes)
        )
        self._last: int | None = None
        self._journal: Path | None = None
        self._writing: tuple[Saving, int, float] | None = None
        """A background save, its step, and the milliseconds that training was held for it."""
        self._in_journal = 0

    def resume(self) -> Position:
        """Load the run's newest step, if `resume` is set and there is one; returns the run's position.

        Raises `ZerokitError` before the first step if a later save would fail.
        """
        if self._target is None:
            return Position()
        run, optimizer = self._target
        try:
            from zerokit.checkpoint.check import check_directory
            from zerokit.checkpoint.listing import list_steps
            from zerokit.checkpoint.run import later_steps
        except ModuleNotFoundError as error:
            if error.name != "zlib_ng":
                raise
            raise UsageError(
                "--save needs zlib-ng, which is not installed here: pip install zlib-ng, or bench without --save"
            ) from error

        check_directory(run, overwrite=True)  # of later steps it says below what can be done here
        resumes = self._settings.resume or self._settings.elastic
        places = run if self._memory is None else [self._memory.directory, run]
        there = resumes and list_steps(places, None if self._memory is None else optimizer)
        begin = self._load_newest(places, run, optimizer) if there else Position()
        if self._memory is not None:
            self._memory.begin(begin.step)
        if self._settings.elastic:
            self._begin_part(run, begin)
        elif later := later_steps(run, begin.step):
            begins = f"this bench starts after step {begin.step}"
            advice = (
                "--save to another directory" if self._settings.resume else "--resume, or --save elsewhere"
            )
            raise UsageError(
                f"{run} already has step {later[-1]}, and {begins}. Committed steps are never replaced: {advice}"
            )
        return begin

    def _begin_part(self, run: Path, begin: Position) -> None:
        """Note in the journal that these ranks start a part here."""
        settings, journal = self._settings, Journal(run)
        if begin.step >= settings.steps and journal.count() == 0:
            raise UsageError(
                f"{run} already has step {begin.step}, and an elastic bench ends at step {settings.steps}: "
                "give more --steps, or --save elsewhere"
            )
        gather(None)  # none of them begins a part before all have checked
        if dist.get_rank() == 0:
            steps, samples = (begin.step + 1, begin.step), (begin.samples, settings.samples_per_step)
            self._journal = journal.begin_part(
                Part(settings.world, settings.nodes, *steps, *samples, ended="", where=begin.where)
            )

    def _load_newest(self, places: Path | list[Path], run: Path, optimizer: ZeroOptimizer) -> Position:
        from zerokit.checkpoint.load import load

        started = time.perf_counter()
        with noted(self.done.notes):
            extra = load(places, optimizer)
        known = isinstance(extra, dict) and all(
            isinstance(extra.get(one), int) for one in ("step", "samples")
        )
        if not known:
            raise UsageError(f"{run}: not saved by zerokit bench, so it cannot be resumed here")
        for name in _IDENTITY:
            if extra.get(name) != getattr(self._settings, name):
                raise UsageError(
                    f"{run} was trained with --{name} {extra.get(name)}, not {getattr(self._settings, name)}: "
                    "resume with the same, or save to another directory"
                )
        self.done.load_ms = (time.perf_counter() - started) * 1000.0
        where: Where = "copies" if MARK in extra else "run"
        self.done.resumed_from, self.done.resumed_where = extra["step"], where
        self._last = extra["step"] if where == "run" else None
        return Position(extra["step"], extra["samples"], where)

    def due(self, trained: int, *, last: bool) -> bool:
        """Whether a checkpoint or a copy is due: after this number of steps, or at the end of the bench."""
        return self._saves(trained, last=last) or self._copies(trained, last=last)

    def _copies(self, trained: int, *, last: bool) -> bool:
        return self._memory is not None and not last and self._memory.due(trained)

    def _saves(self, trained: int, *, last: bool) -> bool:
        if self._target is None or self._last == trained:
            return False
        every = self._settings.saves_every
        return last or (every is not None and trained % every == 0)

    def after_step(self, done: Measured, *, last: bool) -> None:
        """Save if `due`; with `last`, wait until everything is on disk."""
        if self._journal is not None:
            note(self._journal, trained=done.trained)
        if last:
            self._settle()
        if self._target is None or not self.due(done.trained, last=last):
            return
        if self._settings.elastic:
            self._write_journal(done)
        extra = {name: getattr(self._settings, name) for name in _IDENTITY}
        extra |= {"step": done.trained, "samples": done.samples}
        if self._saves(done.trained, last=last):
            self._save(*self._target, done, extra, last=last)
        if self._memory is not None and self._copies(done.trained, last=last):
            self._memory.after_step(done.trained, extra)

    def finish(self, done: Measured) -> None:
        """All steps are trained: save the last one if that was not done, and remove what is in the nodes' memory."""
        self.after_step(done, last=True)
        if self._memory is not None:
            self.done.copies = self._memory.finish()

    def _save(
        self, run: Path, optimizer: ZeroOptimizer, done: Measured, extra: dict[str, Any], *, last: bool
    ) -> None:
        from zerokit.checkpoint.save import save

        started = time.perf_counter()
        # A later step that is there was not gone on from: it is damaged, or nothing led to it yet.
        what: dict[str, Any] = {"step": done.trained, "extra": extra, "overwrite": self._settings.elastic}
        self._last = done.trained
        if self._settings.background and not last:
            self._settle()
            saving = save(run, optimizer, blocking=False, **what)
            self._writing = saving, done.trained, (time.perf_counter() - started) * 1000.0
        else:
            path = save(run, optimizer, **what)
            self._add(path, done.trained, (time.perf_counter() - started) * 1000.0)

    def _settle(self) -> None:
        """Wait for the background save, if there is one."""
        if self._writing is not None:
            saving, step, held_ms = self._writing
            self._writing = None
            self._add(saving.wait(), step, held_ms)

    def _add(self, path: Path, step: int, ms: float) -> None:
        self.done.saves.append(Save(step, ms, sum(file.stat().st_size for file in path.iterdir())))

    def _write_journal(self, done: Measured) -> None:
        """What the steps since the last checkpoint have shown goes into the journal, before the next one is there."""
        new = done.loss[self._in_journal :]
        by_rank = gather((new, done.count[self._in_journal :]))
        if self._journal is not None:
            norms = done.gradient_norm[self._in_journal :]
            first, losses = done.trained - len(new) + 1, mean_over_ranks(*zip(*by_rank, strict=True))
            note(self._journal, first=first, loss=losses, gradient_norm=norms)
        self._in_journal = len(done.loss)


def mean_over_ranks(losses: Sequence[Sequence[float]], counts: Sequence[Sequence[float]]) -> list[float]:
    """Each step's loss over all ranks; `losses` has one list per rank for the same steps, and so has `counts`."""
    steps = zip(zip(*losses, strict=True), zip(*counts, strict=True), strict=True)
    return [
        sum(loss * count for loss, count in zip(step, of, strict=True)) / (sum(of) or 1.0)
        for step, of in steps
    ]
