"""The progress of a bench or a sweep, on stderr.

On a terminal it is drawn as bars; elsewhere a sweep writes a plain line a cell, and a single bench nothing.
"""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from zerokit.bench.record.record import Record
from zerokit.bench.record.status import Progress as BenchProgress
from zerokit.terminal.screen import line
from zerokit.text import mib, ms, printable, printable_lines, rate

# Narrower than this, bars are short and notes are left out.
_NARROW = 70
_LINE_SECONDS = 20.0
"""Between two lines that stand for the bars where there is no terminal, as in a job's log."""


class _Count(MofNCompleteColumn):
    """Steps done of all, once it is known how many there are."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class _Clock(TimeElapsedColumn):
    """Goes on after the last step, while a bench finishes."""

    def render(self, task: Task) -> Text:
        return Text(str(timedelta(seconds=int(task.elapsed or 0.0))), style="progress.elapsed")


class Bars:
    """Shows progress while it is entered.

    Args:
        cells: of the sweep; 1 for a single bench.
    """

    def __init__(self, cells: int = 1) -> None:
        self.errors = Console(stderr=True, highlight=False)
        self._cells = cells
        narrow = self.errors.width < _NARROW
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=10 if narrow else 24),
            _Count(),
            *([] if narrow else [TextColumn("{task.fields[note]}", markup=False)]),
            _Clock(),
            console=self.errors,
            disable=not self.errors.is_terminal,
            transient=True,
            refresh_per_second=2,  # drawing takes a core a millisecond or two, which the ranks may be using
        )
        self._sweep = self._progress.add_task("sweep", total=cells, note="", visible=cells > 1)
        self._task = self._progress.add_task("starting", total=None, note="")
        self._told = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, text: str) -> None:
        """Show the current phase while no steps are running."""
        self._progress.update(self._task, description=text, note="")

    def show(self, progress: BenchProgress) -> None:
        """Move the bar of the current cell."""
        known = progress.loss is not None and progress.step_ms is not None
        part, note = _part(progress), f"loss {progress.loss:.3f}  {progress.step_ms:.0f} ms" if known else ""
        self._progress.update(
            self._task, description=part, completed=progress.done, total=progress.total, note=note
        )
        if not self.errors.is_terminal and time.monotonic() - self._told >= _LINE_SECONDS:
            self._told = time.monotonic()
            line(self.errors, f"{part}: step {progress.done} of {progress.total}  {note}".rstrip())

    def began(self, number: int, label: str) -> None:
        """Show that a cell of the sweep starts."""
        self._progress.update(self._sweep, completed=number, note=printable(label))
        self._progress.remove_task(self._task)  # `reset` would keep the last cell's number of steps
        self._task = self._progress.add_task("starting", total=None, note="")

    def ended(self, number: int, label: str, record: Record, *, before: bool) -> None:
        """Print a line about a finished cell of a sweep; a single bench has a table instead."""
        if self._cells == 1:
            return
        self._progress.update(self._sweep, completed=number + 1, note="")
        digits = len(str(self._cells))
        told = Text(f"[{number + 1:>{digits}}/{self._cells}] {printable(label)}  ")
        if record.status == "ok" and record.results is not None and record.model is not None:
            results = record.results
            peak = results.peak_allocated_bytes or results.peak_host_bytes
            told.append(
                f"{ms(results.step.p50)}  {rate(results.throughput)} {record.model.unit}/s  {mib(peak)}"
            )
        else:
            reason = printable((record.reason or "").partition("\n")[0])
            told.append(record.status, style="yellow" if record.status.final else "red")
            told.append(f": {reason}")
        if before:
            told.append("  (from before)", style="dim")
        self.errors.print(told, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning on stderr, above the bars."""
        self.errors.print(Text(f"zerokit: {printable_lines(text)}"), soft_wrap=True)


def _part(progress: BenchProgress) -> str:
    """The part of a bench that runs now; phases and bandwidths follow the last step."""
    if progress.done == progress.total:
        return "finishing"
    return "warm-up" if progress.done <= progress.warmup else "measuring"
