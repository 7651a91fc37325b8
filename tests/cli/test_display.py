"""What a terminal shows while a bench runs."""

from __future__ import annotations

import time

from rich.progress import Progress

from zerokit.cli.display import _Clock, _Count


def test_the_clock_goes_on_while_a_bench_finishes() -> None:
    now = 100.0
    progress = Progress(_Clock(), get_time=lambda: now)
    task = progress.add_task("finishing", total=3)
    now += 5
    progress.update(task, completed=3)
    now += 70
    assert _Clock().render(progress.tasks[0]).plain == "0:01:15"


def test_steps_are_counted_once_it_is_known_how_many_there_are() -> None:
    progress = Progress(_Count(), get_time=time.monotonic)
    task = progress.add_task("starting", total=None)
    assert _Count().render(progress.tasks[0]).plain == ""
    progress.update(task, total=12, completed=3)
    assert _Count().render(progress.tasks[0]).plain == " 3/12"
