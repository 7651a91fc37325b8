"""The output of `zerokit bench`: progress on stderr, then tables on stdout.

On a terminal progress is drawn as bars; elsewhere a sweep writes a plain line a cell, and a single bench nothing.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType

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
from zerokit.bench.tracking.push import Tracker
from zerokit.cli.work import mib, ms, rate
from zerokit.text import printable, printable_lines, without_secrets

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


class Display:
    """Progress while it is entered; `table` and `files` after that.

    Args:
        cells: of the sweep; 1 for a single bench.
    """

    def __init__(self, cells: int = 1) -> None:
        self._errors = Console(stderr=True, highlight=False)
        self._out = Console(highlight=False)
        self._cells = cells
        narrow = self._errors.width < _NARROW
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=10 if narrow else 24),
            _Count(),
            *([] if narrow else [TextColumn("{task.fields[note]}", markup=False)]),
            _Clock(),
            console=self._errors,
            disable=not self._errors.is_terminal,
            transient=True,
            refresh_per_second=2,  # drawing takes a core a millisecond or two, which the ranks may be using
        )
        self._sweep = self._progress.add_task("sweep", total=cells, note="", visible=cells > 1)
        self._task = self._progress.add_task("starting", total=None, note="")
        self._told = time.monotonic()

    def __enter__(self) -> Display:
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
        if not self._errors.is_terminal and time.monotonic() - self._told >= _LINE_SECONDS:
            self._told = time.monotonic()
            line = f"{part}: step {progress.done} of {progress.total}  {note}".rstrip()
            self._errors.print(Text(line), soft_wrap=True)

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
        line = Text(f"[{number + 1:>{digits}}/{self._cells}] {printable(label)}  ")
        if record.status == "ok" and record.results is not None and record.model is not None:
            results = record.results
            peak = results.peak_allocated_bytes or results.peak_host_bytes
            line.append(
                f"{ms(results.step.p50)}  {rate(results.throughput)} {record.model.unit}/s  {mib(peak)}"
            )
        else:
            reason = printable((record.reason or "").partition("\n")[0])
            line.append(record.status, style="yellow" if record.status.final else "red")
            line.append(f": {reason}")
        if before:
            line.append("  (from before)", style="dim")
        self._errors.print(line, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning on stderr, above the bars."""
        self._errors.print(Text(f"zerokit: {printable_lines(text)}"), soft_wrap=True)

    def table(self, records: Sequence[Record], baseline: str | None = None) -> None:
        """Print the table of a bench or a sweep, compared with the cell of the label `baseline`."""
        from zerokit.bench.comparison.cells import make_cells
        from zerokit.bench.record.record import Run
        from zerokit.cli.tables import show

        show(self._out, make_cells([Run("", tuple(records))], baseline))

    def files(self, files: Mapping[str, str], tracker: Tracker, *, to_stderr: bool) -> None:
        """Print where the results are, and how to open the MLflow run or to repeat a failed write."""
        lines = ["", *(f"{name:<8}{path}" for name, path in files.items())]
        if tracker.lost:
            lines.append(f"MLflow  not complete; later: {tracker.later}")
        elif tracker.tracking is not None and tracker.run_id is not None:
            lines.append(f"MLflow  run {tracker.run_id}")
            lines += open_lines(tracker.tracking.uri, tracker.page, tracker.view)
        text = "\n".join(map(printable, lines))
        (self._errors if to_stderr else self._out).print(Text(text), soft_wrap=True)


def open_lines(uri: str, page: str | None, view: str | None = None) -> list[str]:
    """How to view the runs: the command that serves the store, the page of the run, and the cells of a sweep."""
    uri = without_secrets(uri)
    serve = [] if uri.startswith("http") else [f"serve   mlflow ui --backend-store-uri {shlex.quote(uri)}"]
    return [*serve, f"open    {page or uri}", *([f"cells   {view}"] if view else [])]


def _part(progress: BenchProgress) -> str:
    """The part of a bench that runs now; phases and bandwidths follow the last step."""
    if progress.done == progress.total:
        return "finishing"
    return "warm-up" if progress.done <= progress.warmup else "measuring"


def write_report(
    records: Sequence[Record], path: Path, warn: Callable[[str], None], baseline: str | None = None
) -> bool:
    """Write the page of a sweep; False, with a warning, if it cannot be made."""
    from zerokit.bench.record.record import Run

    try:
        from zerokit.bench.report.render import write_comparison  # a bare GPU machine has no altair

        write_comparison([Run("", tuple(records))], path, baseline)
    except Exception as error:  # a page is no reason to end a sweep whose records are whole
        warn(f"the report was not written: {type(error).__name__}: {error}")
        return False
    return True
