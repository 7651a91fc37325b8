"""`zerokit compare`."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from zerokit.cli.work import Finite, Name, json_option, note, say, tracking_uri_option
from zerokit.errors import UsageError, ZerokitError
from zerokit.text import printable


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
unknown because there is only one run of each, or a run lacks a cell.
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
def command(*, github: bool, as_json: bool, **options: Any) -> None:
    """Compare benches: figures, differences, and whether differences exceed the noise.

    With one RUN, all its cells are compared with the first. With several, cells are matched by the settings that vary
    within the runs, such as engine and stage; all other differences between settings are listed.
    """
    try:
        _compare(github=github, as_json=as_json, **options)
    except ZerokitError as error:
        if not github:
            raise
        _annotate(error, as_json)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _annotate(error: ZerokitError, as_json: bool) -> None:
    from zerokit.bench.report.github import Annotation

    click.echo(str(Annotation("error", "zerokit compare", printable(str(error)))), err=as_json)


def _compare(
    *,
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
    from zerokit.bench.comparison.plain import plain
    from zerokit.bench.comparison.runs import compared
    from zerokit.bench.report import github as hub
    from zerokit.bench.tracking.store import load_run
    from zerokit.terminal.comparison import show

    parsed = [Rule.parse(rule) for rule in rules]
    shown = [known_metric(name) for name in metrics]
    if not names:
        raise UsageError(
            "name at least one RUN: a record, a folder of records, or an MLflow run or experiment"
        )
    runs, label, ignored = compared(names, baseline, lambda name: load_run(name, tracking_uri))
    note(f"{name} is ignored: all its records are in an earlier RUN" for name in ignored)
    cells = make_cells(runs, label)
    broken = regressions(parsed, cells)
    differing = [] if tolerance is None else disagreements(cells, tolerance)
    if html is not None:
        from zerokit.bench.report.render import write_comparison

        write_comparison(runs, html, label)
        say(f"report  {html}", err=True)
    if as_json:
        text = json.dumps(plain(cells, broken, differing), indent=2, allow_nan=False)
        click.echo(hub.inert_json(text) if github else text)
    else:
        from rich.console import Console

        with hub.no_commands(click.echo) if github else nullcontext():
            show(Console(highlight=False), cells, shown)
    code = 3 if differing or any(one.known for one in broken) else 4 if broken else 0
    if github:
        told = hub.annotate(cells, broken, differing, gated=bool(parsed) or tolerance is not None)
        for command in hub.commands(told):
            click.echo(command, err=as_json)
        if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            try:
                hub.append_summary(Path(summary), told, cells, [*shown, *(rule.metric for rule in parsed)])
            except ZerokitError as error:
                _annotate(error, as_json)
                code = code or 1
        else:
            note(["GITHUB_STEP_SUMMARY is not set, as outside of GitHub Actions: no summary"])
    else:
        note([*(one.message for one in broken), *differing])
    sys.exit(code)
