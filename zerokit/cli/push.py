"""`zerokit push`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click

from zerokit.cli.work import PATH, experiment_option, json_option, print_json, say, tracking_uri_option
from zerokit.text import without_secrets


@click.command(epilog="Nothing is written twice, so an interrupted push can simply be repeated.")
@click.argument("paths", metavar="RECORD|FOLDER…", nargs=-1, required=True, type=PATH)
@tracking_uri_option
@experiment_option
@json_option("Print the outcome of each record on stdout, as JSON.")
def command(paths: tuple[Path, ...], tracking_uri: str | None, experiment: str, as_json: bool) -> None:
    """Write records on disk to MLflow: one run per record, and one parent run per sweep.

    A JSON file of pytest-benchmark becomes a parent run, with a child run for each benchmark in it.

    For benches that ran without a tracking server, or whose server failed. Each record has one run, however often
    it is pushed, and even if it was tracked while it ran.
    """
    from zerokit.bench.tracking.push import Done, Mirror, find_records, open_lines, push
    from zerokit.bench.tracking.store import Tracking, resolve_uri
    from zerokit.interrupts import Interrupts

    records = find_records(paths)
    tracking = Tracking(resolve_uri(tracking_uri), experiment)
    shown = without_secrets(tracking.uri)
    results: list[Done] = []

    def show(done: Done) -> None:
        results.append(done)
        reason = f": {done.reason}" if done.reason else ""
        say(f"{_WORDS[done.outcome]:<14}{done.path}{reason}", err=True)

    with Interrupts() as interrupts:
        push(records, Mirror(tracking), interrupted=interrupts.check, show=show)
    counts = Counter(done.outcome for done in results)
    if as_json:
        content = [{**asdict(done), "path": str(done.path)} for done in results]
        plain = {"tracking_uri": shown, "experiment": experiment, "records": content}
        print_json(plain)
    else:
        summary = ", ".join(f"{count} {_WORDS[outcome]}" for outcome, count in counts.items())
        say(f"{summary}: experiment {experiment} at {shown}")
        last = next((done for done in reversed(results) if done.page), None)
        for line in open_lines(tracking.uri, last.page if last else None, last.view if last else None):
            say(line)
    if counts["failed"]:
        raise SystemExit(1)


_WORDS = {
    "new": "pushed",
    "completed": "completed",
    "there": "already there",
    "left out": "unsupported",
    "failed": "not a record",
}
