"""`zerokit compare`."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zerokit.cli.work import Finite, Name, json_option, note, say, tracking_uri_option
from zerokit.errors import UsageError

if TYPE_CHECKING:
    from zerokit.bench.record.record import Run


def _metrics() -> list[str]:
    from zerokit.bench.record.metrics import METRICS

    return list(METRICS)


_METRIC = Name(_metrics, "metric")
_EPILOG = """\b
RUN: a record, a folder of records (a sweep), the id of an MLflow run, or the
name of an MLflow experiment.
\b
Exit codes: 0 ok, 1 error, 2 wrong usage, 3 worse than --fail-on allows or
losses that differ, 4 undecided: the noise between runs is too large, or
unknown because there is only one run of each.
"""


@click.command(epilog=_EPILOG)
@click.argument("names", metavar="RUN…", nargs=-1)
@click.option(
    "--baseline",
    metavar="RUN|CELL",
    help="Baseline: a run, or a cell by its name in the table, such as 'FSDP2 3'.  [default: the first run; "
    "in a single sweep its first cell]",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    type=_METRIC,
    help="Show this metric; can be repeated.  [default: the main metrics]",
)
@click.option(
    "--fail-on",
    "rules",
    multiple=True,
    type=_METRIC,
    metavar="METRIC:PERCENT",
    help="Exit with 3 if METRIC is worse than the baseline's by more than PERCENT and by more than the noise between "
    "runs, and with 4 if that cannot be decided. Example: step/p50_ms:3%. step/paced finds smaller differences.",
)
@click.option(
    "--losses-agree",
    "tolerance",
    type=Finite(min=0),
    metavar="X",
    help="Exit with 3 if the losses of cells with equal training differ by more than this share in any step. Example: "
    "1e-5. In half precision engines round differently: allow at least 1e-2 between engines.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write an HTML page with pictures to this file.",
)
@click.option(
    "--github",
    is_flag=True,
    help="Print annotations for GitHub Actions, on stderr with --json, and append a table to the job's summary.",
)
@json_option("Print only JSON on stdout.")
@tracking_uri_option
def command(
    names: tuple[str, ...],
    baseline: str | None,
    metrics: tuple[str, ...],
    rules: tuple[str, ...],
    tolerance: float | None,
    html: Path | None,
    github: bool,
    as_json: bool,
    tracking_uri: str | None,
) -> None:
    """Compare benches: figures, differences, and whether differences exceed the noise.

    With one RUN, all its cells are compared with the first. With several, cells are matched by the settings that vary
    within the runs, such as engine and stage; all other differences between settings are listed.
    """
    from zerokit.cli.github import annotated_errors

    with annotated_errors(err=as_json) if github else nullcontext():
        _compare(names, baseline, metrics, rules, tolerance, html, github, as_json, tracking_uri)


def _compare(
    names: tuple[str, ...],
    baseline: str | None,
    metrics: tuple[str, ...],
    rules: tuple[str, ...],
    tolerance: float | None,
    html: Path | None,
    github: bool,
    as_json: bool,
    tracking_uri: str | None,
) -> None:
    from zerokit.bench.comparison.cells import make_cells
    from zerokit.bench.comparison.differences import Rule, disagreements, known_metric, regressions
    from zerokit.bench.tracking.store import load_run
    from zerokit.cli.github import inert_json, no_commands, report
    from zerokit.cli.tables import comparison_json, show

    parsed = [Rule.parse(rule) for rule in rules]
    shown = [known_metric(name) for name in metrics]
    if not names:
        raise UsageError(
            "name at least one RUN: a record, a folder of records, or an MLflow run or experiment"
        )
    runs = [load_run(name, tracking_uri) for name in dict.fromkeys(names)]
    labels = [cell.label for cell in make_cells(runs)]
    by_label = baseline not in names and baseline in labels
    if baseline is not None and not by_label:
        first = next((run for run in runs if run.name == baseline), None)
        try:
            first = first or load_run(baseline, tracking_uri)
        except UsageError as error:
            raise UsageError(f"--baseline: {error}; or name a cell: {', '.join(map(repr, labels))}") from None
        runs = [first, *(run for run in runs if run is not first)]
    runs = _once(runs)
    label = baseline if by_label else None
    cells = make_cells(runs, label)
    broken = regressions(parsed, cells)
    differing = [] if tolerance is None else disagreements(cells, tolerance)
    if html is not None:
        from zerokit.bench.report.render import write_comparison

        write_comparison(runs, html, label)
        say(f"report  {html}", err=True)
    if as_json:
        text = comparison_json(cells, broken, differing)
        click.echo(inert_json(text) if github else text)
    else:
        from rich.console import Console

        with no_commands() if github else nullcontext():
            show(Console(highlight=False), cells, shown)
    if github:
        wanted = [*shown, *(rule.metric for rule in parsed)]
        gated = bool(parsed) or tolerance is not None
        report(cells, broken, differing, wanted, gated=gated, err=as_json)
    else:
        note([*(one.message for one in broken), *differing])
    if differing or any(one.known for one in broken):
        sys.exit(3)
    if broken:
        sys.exit(4)


def _once(runs: list[Run]) -> list[Run]:
    """Each record in the first run that has it."""
    from zerokit.bench.record.record import Run

    seen: set[str] = set()
    kept = []
    for run in runs:
        fresh = tuple(record for record in run.records if record.id not in seen)
        seen |= {record.id for record in fresh}
        if fresh:
            kept.append(Run(run.name, fresh))
        else:
            note([f"{run.name} is ignored: all its records are in an earlier RUN"])
    return kept
