"""Checkpoints of a bench: where it resumes, when it saves, and what both cost. Never inside a timed step.

Only a bench that is asked to save imports `zerokit.checkpoint`, which needs zlib-ng.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zerokit.bench.settings import Settings
from zerokit.errors import UsageError

if TYPE_CHECKING:
    from zerokit.runtime import ZeroOptimizer


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint: the steps trained by then, how long all ranks were busy with it, and its size on the disk."""

    step: int
    ms: float
    size_bytes: int


@dataclass(slots=True)
class Checkpoints:
    """What a bench did with checkpoints; `resumed_from` is the step it went on from, null for a fresh start."""

    resumed_from: int | None = None
    load_ms: float | None = None
    saves: list[Save] = field(default_factory=list)


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

    def resume(self) -> int:
        """Load the run's newest step, if `resume` is asked for and there is one; returns the steps trained so far.

        Raises `ZerokitError` where what is to be saved could not be, before any step is made for it.
        """
        if self._run is None or self._optimizer is None:
            return 0
        try:
            from zerokit.checkpoint.run import check_run, later_steps
        except ModuleNotFoundError as error:
            if error.name != "zlib_ng":
                raise
            raise UsageError(
                "--save needs zlib-ng, which is not installed here: pip install zlib-ng, or bench without --save"
            ) from error

        check_run(self._run, overwrite=True)  # of later steps it says below what can be done here
        trained = self._load_newest()
        if later := later_steps(self._run, trained):
            begins = f"this bench begins after step {trained}"
            advice = (
                "--save to another directory" if self._settings.resume else "--resume, or --save elsewhere"
            )
            raise UsageError(
                f"{self._run} holds step {later[-1]} already, and {begins}: what is saved is never replaced: {advice}"
            )
        return trained

    def _load_newest(self) -> int:
        if self._run is None or self._optimizer is None:
            return 0
        if not self._settings.resume or not (self._run / "latest").exists():
            return 0
        from zerokit.checkpoint.load import load

        started = time.perf_counter()
        extra = load(self._run, self._optimizer)
        if not isinstance(extra, dict) or not isinstance(extra.get("step"), int):
            raise UsageError(f"{self._run}: not saved by zerokit bench, so it cannot be resumed here")
        for name in ("model", "seed", "data"):
            if extra.get(name) != getattr(self._settings, name):
                raise UsageError(
                    f"{self._run} was trained with --{name} {extra.get(name)}, not {getattr(self._settings, name)}: "
                    "resume with the same, or save to another directory"
                )
        self.done.load_ms = (time.perf_counter() - started) * 1000.0
        self.done.resumed_from = self._last = extra["step"]
        return int(extra["step"])

    def due(self, trained: int, *, last: bool) -> bool:
        """Whether the number of trained steps, or the end of the bench, asks for a checkpoint that is not there."""
        if self._run is None or self._optimizer is None or self._last == trained:
            return False
        every = self._settings.save_every
        return last or (every is not None and trained % every == 0)

    def after_step(self, trained: int, *, last: bool) -> None:
        """Save if `due`."""
        if self._run is None or self._optimizer is None or not self.due(trained, last=last):
            return
        from zerokit.checkpoint.save import save

        extra = {name: getattr(self._settings, name) for name in ("model", "seed", "data")} | {
            "step": trained
        }
        started = time.perf_counter()
        path = save(self._run, self._optimizer, step=trained, extra=extra)
        elapsed = (time.perf_counter() - started) * 1000.0
        size = sum(file.stat().st_size for file in path.iterdir())
        self.done.saves.append(Save(trained, elapsed, size))
        self._last = trained
