"""Progress through a file: only whole lines count, and only the newest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zerokit.bench.record.status import Progress, read_progress, write_progress
from zerokit.cli.display import Display


def test_the_reader_sees_the_newest_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    assert read_progress(path) is None
    first, second = Progress(1, 9, 2, 5.5, 100.0), Progress(2, 9, 2, 5.0, 90.0)
    write_progress(path, first)
    write_progress(path, second)
    assert read_progress(path) == second
    with path.open("a") as file:
        file.write("[3, 9, 2, 4")
    assert read_progress(path) == second
    with path.open("a") as file:
        file.write(".5, 80.0]\n")
    assert read_progress(path) == Progress(3, 9, 2, 4.5, 80.0)


def test_what_is_not_known_yet_is_shown_as_nothing(tmp_path: Path) -> None:
    step = Progress(3, 9, 2, None, None)
    write_progress(tmp_path / "p", step)
    assert read_progress(tmp_path / "p") == step
    with Display() as display:
        for shown, note in ((replace(step, loss=1.5, step_ms=20.0), "loss 1.500  20 ms"), (step, "")):
            display.show(shown)
            (task,) = display._progress.tasks
            assert (task.completed, task.total, task.fields["note"]) == (3, 9, note)
