"""The output of `zerokit bench`: progress on stderr, then tables on stdout, and where the results are."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from zerokit.bench.record.record import Record
from zerokit.bench.tracking.push import Tracker
from zerokit.terminal.bars import Bars
from zerokit.text import printable, without_secrets


class Display(Bars):
    """Progress while it is entered; `table` and `files` after that."""

    def table(self, records: Sequence[Record], baseline: str | None = None) -> None:
        """Print the table of a bench or a sweep, compared with the cell of the label `baseline`."""
        from zerokit.bench.comparison.cells import make_cells
        from zerokit.bench.record.record import Run
        from zerokit.terminal.comparison import show

        show(Console(highlight=False), make_cells([Run("", tuple(records))], baseline))

    def files(self, files: Mapping[str, str], tracker: Tracker, *, to_stderr: bool) -> None:
        """Print where the results are, and how to open the MLflow run or to repeat a failed write."""
        lines = ["", *(f"{name:<8}{path}" for name, path in files.items())]
        if tracker.lost:
            lines.append(f"MLflow  not complete; later: {tracker.later}")
        elif tracker.tracking is not None and tracker.run_id is not None:
            lines.append(f"MLflow  run {tracker.run_id}")
            lines += open_lines(tracker.tracking.uri, tracker.page, tracker.view)
        text = "\n".join(map(printable, lines))
        console = self.errors if to_stderr else Console(highlight=False)
        console.print(Text(text), soft_wrap=True)


def open_lines(uri: str, page: str | None, view: str | None = None) -> list[str]:
    """How to view the runs: the command that serves the store, the page of the run, and the cells of a sweep."""
    uri = without_secrets(uri)
    serve = [] if uri.startswith("http") else [f"serve   mlflow ui --backend-store-uri {shlex.quote(uri)}"]
    return [*serve, f"open    {page or uri}", *([f"cells   {view}"] if view else [])]


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
