"""What `zerokit bench` shows: progress on stderr if that is a terminal, then tables on stdout."""

from __future__ import annotations

import shlex
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from zerokit.bench.progress import Progress as BenchProgress
from zerokit.bench.record import Rank, Record
from zerokit.bench.session import Outcome
from zerokit.bench.statistics import quantile

MIB = 2**20
# More ranks than this are shown as the lowest and the highest only.
RANKS_SHOWN = 16


class Display:
    """Progress while it is entered; `results` and `places` after that."""

    def __init__(self) -> None:
        self._errors = Console(stderr=True, highlight=False)
        self._out = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self._errors,
            disable=not self._errors.is_terminal,
            transient=True,
            refresh_per_second=2,  # drawing takes a core a millisecond or two, which the ranks may be using
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Display:
        self._progress.start()
        self._task = self._progress.add_task("starting", total=None, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, text: str) -> None:
        """Say what is going on before the first step."""
        if self._task is not None:
            self._progress.update(self._task, description=text)

    def show(self, progress: BenchProgress) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(
                self._task,
                description="warm-up" if progress.done <= progress.warmup else "measuring",
                completed=progress.done,
                total=progress.total,
                note=f"loss {progress.loss:.3f}  {progress.step_ms:.0f} ms",
            )

    def warn(self, text: str) -> None:
        """A line on stderr, above the bar."""
        self._errors.print(Text(f"zerokit: {text}"), soft_wrap=True)

    def results(self, record: Record) -> None:
        """The tables."""
        settings, results, environment = record.settings, record.results, record.environment
        if results is None or environment is None or record.model is None:
            self._out.print(Text(f"{record.status}: {record.reason}"))
            return
        nodes = f"{settings.nodes} node{'s' if settings.nodes > 1 else ''}"
        ranks = f"{settings.world} rank{'s' if settings.world > 1 else ''}"
        self._out.print(
            Text.assemble(
                (f"{settings.model}", "bold"),
                f" ({_count(record.model.parameters)} parameters), stage {settings.stage}, "
                f"{settings.precision}, {ranks} on {nodes}, {environment.backend}",
            )
        )
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        table.add_row(
            "loss",
            f"{_loss(results.loss_first)} → {_loss(results.loss_last)}",
            f"first and last of {len(record.loss)} steps, {settings.warmup} of them warm-up",
        )
        table.add_row(
            "step p50", _ms(results.step.p50), f"of {results.step.count} steps, slowest rank of each"
        )
        table.add_row("step p90", _ms(results.step.p90), f"p10 {_ms(results.step.p10)}")
        table.add_row(
            f"{record.model.unit}/s",
            f"{results.throughput:,.0f}",
            f"{results.throughput_per_rank:,.0f} a rank; "
            f"{settings.samples_per_step * record.model.units_per_sample:,} {record.model.unit} a step",
        )
        if (traffic := record.traffic) is not None:
            table.add_row(
                "moved a step",
                _mib(traffic.bytes),
                f"predicted {_mib(traffic.predicted_bytes)}: {traffic.formula}",
            )
        if record.skipped_steps:
            table.add_row("skipped steps", str(record.skipped_steps), "gradients overflowed in fp16")
        for row in _checkpoint_rows(record):
            table.add_row(*row)
        self._out.print(table)
        self._out.print()
        self._out.print(_rank_table(record.ranks))
        self._out.print(
            Text("state: parameters, gradients, optimizer, buckets; part of the peak", style="dim")
        )

    def places(self, outcome: Outcome, *, to_stderr: bool) -> None:
        """Where the record and the MLflow run are, and how to open the latter."""
        console = self._errors if to_stderr else self._out
        lines = ["", f"record  {outcome.path}"]
        if (tracker := outcome.tracker) is not None:
            lines.append(f"MLflow  run {tracker.run_id}")
            served = tracker.uri.startswith("http")
            command = f"mlflow ui --backend-store-uri {shlex.quote(tracker.uri)}"
            lines.append(f"open    {tracker.uri if served else command}")
        console.print(Text("\n".join(lines)), soft_wrap=True)


def _checkpoint_rows(record: Record) -> list[tuple[str, str, str]]:
    done, run = record.checkpoints, record.settings.save
    rows = []
    if done.resumed_from is not None:
        rows.append(("resumed", f"step {done.resumed_from}", f"from {run}, {_ms(done.load_ms or 0.0)}"))
    if done.saves:
        last = done.saves[-1]
        count = f"{len(done.saves)} checkpoint{'s' if len(done.saves) > 1 else ''}"
        rows.append(
            (
                "saved",
                f"step {last.step}",
                f"{count} in {run}; the last {_mib(last.size_bytes)}, {_ms(last.ms)}",
            )
        )
    return rows


def _rank_table(ranks: list[Rank]) -> Table:
    """A row a rank: its steps, its peak memory, its state as counted and as predicted."""
    on_cuda = ranks[0].peak_allocated_bytes is not None
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    headings = ["rank", "node", "step p50", "peak host", "state", "predicted"]
    if on_cuda:
        headings.insert(4, "peak CUDA")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for rank in ranks if len(ranks) <= RANKS_SHOWN else _extremes(ranks):
        row = [
            str(rank.rank),
            str(rank.node),
            _ms(quantile(rank.step_ms, 0.5)),
            _mib(rank.peak_host_bytes),
            _mib(rank.memory_bytes["total"]) if rank.memory_bytes else "",
            _mib(rank.predicted_memory_bytes["total"]) if rank.predicted_memory_bytes else "",
        ]
        if on_cuda:
            row.insert(4, _mib(rank.peak_allocated_bytes or 0))
        table.add_row(*row)
    return table


def _extremes(ranks: list[Rank]) -> list[Rank]:
    """The ranks with the least and the most memory."""

    def peak(rank: Rank) -> int:
        return rank.peak_allocated_bytes or rank.peak_host_bytes

    return [min(ranks, key=peak), max(ranks, key=peak)]


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _ms(value: float) -> str:
    return f"{value:,.1f} ms"


def _mib(size_bytes: float) -> str:
    if size_bytes >= 10 * 1024 * MIB:
        return f"{size_bytes / MIB / 1024:,.1f} GiB"
    return f"{size_bytes / MIB:,.1f} MiB"


def _count(number: int) -> str:
    """Rounded, with the usual letter: 34.9 K, 124.4 M, 8.0 B."""
    for letter, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)
