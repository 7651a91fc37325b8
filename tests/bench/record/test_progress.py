"""Progress through a file: only whole lines count, and only the newest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zerokit.bench.record.status import Progress, ProgressReader, ProgressWriter
from zerokit.cli.display import Display


def test_the_reader_sees_the_newest_line_once(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    reader = ProgressReader(path)
    assert reader.latest() is None
    writer = ProgressWriter(path)
    first, second = Progress(1, 9, 2, 5.5, 100.0), Progress(2, 9, 2, 5.0, 90.0)
    writer.write(first)
    writer.write(second)
    assert reader.latest() == second
    assert reader.latest() is None
    with path.open("a") as file:
        file.write("[3, 9, 2, 4")
    assert reader.latest() is None
    with path.open("a") as file:
        file.write(".5, 80.0]\n")
    assert reader.latest() == Progress(3, 9, 2, 4.5, 80.0)
    writer.close()


def test_what_is_not_known_yet_is_shown_as_nothing(tmp_path: Path) -> None:
    step = Progress(3, 9, 2, None, None)
    writer = ProgressWriter(tmp_path / "p")
    writer.write(step)
    writer.close()
    assert ProgressReader(tmp_path / "p").latest() == step
    with Display() as display:
        for shown, note in ((replace(step, loss=1.5, step_ms=20.0), "loss 1.500  20 ms"), (step, "")):
            display.show(shown)
            (task,) = display._progress.tasks
            assert (task.completed, task.total, task.fields["note"]) == (3, 9, note)
