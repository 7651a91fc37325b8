"""The output of `zerokit bench`: progress on stderr, then tables on stdout, and where the results are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from zerokit.bench.record.record import Record
from zerokit.bench.tracking.push import Tracker
from zerokit.terminal.bars import Bars
from zerokit.text import printable


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
        lines = ["", *(f"{name:<8}{path}" for name, path in files.items()), *tracker.lines]
        text = "\n".join(map(printable, lines))
        console = self.errors if to_stderr else Console(highlight=False)
        console.print(Text(text), soft_wrap=True)
