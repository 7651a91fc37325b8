"""The journal of an elastic job: its parts are joined to one story, whatever their writers came to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.crashes import Recording, begin_journal, crashes
from zerokit import files
from zerokit.bench.record.journal import FINISHED, UNKNOWN, Journal, Part, note
from zerokit.errors import UsageError


def begin(journal: Journal, world: int, step: int, samples: int) -> Path:
    return journal.begin_part(Part(world, 1, step + 1, step, samples, 2 * world, ""))


def losses(first: int, last: int, part: int = 0) -> list[float]:
    """The losses of steps, which differ from part to part where they are repeated."""
    return [step + part / 10 for step in range(first, last + 1)]


def test_a_power_cut_leaves_no_torn_job(tmp_path: Path) -> None:
    """One would keep everybody from going on."""
    root, calls = tmp_path / "root", tmp_path / "calls"
    root.mkdir()
    begin_journal(root, calls)
    with files.replaced(Recording(root, calls)):
        job = Journal(root / "run").open_job(None, lambda: Path("/record.json"))
    found = {crash.tree.get("run/elastic/job.json") for crash in crashes(calls)}
    whole = json.dumps({"id": job.identity, "record": "record.json"}).encode()
    assert found == {None, whole}


@pytest.mark.parametrize(
    ("parts", "joined", "spans"),
    [
        # Killed while the checkpoint of step 6 was written, and what was noted for it is cut, too.
        (
            [(2, 0, 0, [(1, 3), (4, 6)]), (1, 3, 12, [(4, 6)])],
            [1.0, 2.0, 3.0, 4.1, 5.1, 6.1],
            [(1, 6), (4, 6)],
        ),
        # Killed before its first save: repeated whole.
        ([(2, 0, 0, [(1, 2)]), (1, 0, 0, [(1, 3)])], [1.1, 2.1, 3.1], [(1, 2), (1, 3)]),
        # A job that begins with a checkpoint.
        ([(2, 10, 40, [(11, 12)]), (1, 12, 48, [(13, 14)])], [11.0, 12.0, 13.1, 14.1], [(11, 12), (13, 14)]),
        # Steps that others trained between begin another story.
        ([(2, 0, 0, [(1, 3)]), (2, 7, 28, [(8, 9)])], [8.1, 9.1], [(8, 9)]),
    ],
)
def test_parts_are_joined(
    tmp_path: Path,
    parts: list[tuple[int, int, int, list[tuple[int, int]]]],
    joined: list[float],
    spans: list[tuple[int, int]],
) -> None:
    """Each part's ranks, the step and samples it begins after, and the steps that were noted together."""
    journal = Journal(tmp_path)
    for number, (world, step, samples, noted) in enumerate(parts):
        pen = begin(journal, world, step, samples)
        for first, last in noted:
            noted_losses = losses(first, last, part=number)
            note(pen, first=first, loss=noted_losses, gradient_norm=noted_losses)
    story = journal.story()
    assert story.loss == story.gradient_norm == joined
    assert [(part.first_step, part.last_step) for part in story.parts] == spans
    assert [part.ended for part in story.parts] == [UNKNOWN, FINISHED][-len(spans) :]


def test_a_writer_killed_within_a_line_or_before_its_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    note(begin(journal, 2, 0, 0), trained=1)
    with (tmp_path / "elastic" / "part-0000.jsonl").open("a") as file:
        file.write('{"first": 1, "loss": [1.0, 2')
    for why in ("killed", "the first word about an end stays"):
        journal.end_part(0, why)
        journal.end_part(1, "nothing has begun")
    (tmp_path / "elastic" / "part-0001.jsonl").write_text('{"wor')
    note(begin(journal, 1, 0, 0), trained=2)
    assert journal.story().parts == [Part(2, 1, 1, 1, 0, 4, "killed"), Part(1, 1, 1, 2, 0, 2, FINISHED)]


def test_a_job_keeps_its_name_until_it_is_finished(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run")
    first = journal.open_job(None, lambda: tmp_path / "a.json")
    assert first.record == tmp_path / "a.json"
    begin(journal, 2, 0, 0)
    assert journal.open_job(None, lambda: tmp_path / "b.json") == first
    moved = journal.open_job(tmp_path / "c.json", lambda: tmp_path / "b.json")
    assert (moved.identity, moved.record) == (first.identity, tmp_path / "c.json")
    journal.finish()
    assert journal.count() == 0
    assert journal.open_job(None, lambda: tmp_path / "d.json").identity != first.identity
    assert len(list((tmp_path / "run").glob(f"elastic-{first.identity[:8]}/part-0000.jsonl"))) == 1


def test_a_job_that_cannot_be_read_or_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be (written|read)"):
        Journal(tmp_path / "file").open_job(None, lambda: tmp_path)
    (tmp_path / "elastic").mkdir()
    (tmp_path / "elastic" / "job.json").write_text("{}")
    with pytest.raises(UsageError, match=r"move .*elastic away"):
        Journal(tmp_path).open_job(None, lambda: tmp_path)


_ID = "0123456789abcdef" * 2


def test_a_received_run_names_no_path_outside(tmp_path: Path) -> None:
    """Neither the record's folder, nor that of the finished job, nor what a link leads to."""
    run, mine = tmp_path / "run", tmp_path / "mine"
    (run / "elastic").mkdir(parents=True)
    mine.write_text("mine")
    named = run / "elastic" / "job.json"
    named.write_text(json.dumps({"id": _ID, "record": f"{tmp_path}/home/precious.json"}))
    job = Journal(run).open_job(None, lambda: tmp_path / "records" / "new.json")
    assert (job.identity, job.record) == (_ID, tmp_path / "records" / "precious.json")
    refused: list[object] = [
        {"id": "../../escape" * 3, "record": "a.json"},
        {"id": _ID, "record": ".bashrc"},
        {"id": _ID, "record": ".."},
        {"id": 5, "record": "a.json"},
        [[]],
    ]
    for content in refused:
        named.write_text(json.dumps(content))
        with pytest.raises(UsageError, match=r"job.json cannot be read .*move .*elastic away"):
            Journal(run).open_job(None, lambda: tmp_path / "new.json")
        with pytest.raises(UsageError, match=r"job.json cannot be read"):
            Journal(run).finish()
    (run / "elastic" / "part-0000.jsonl").symlink_to(mine)
    with pytest.raises(UsageError, match=r"part-0000.jsonl is not a file"):
        Journal(run).end_part(0, "killed")
    (run / "elastic").rename(tmp_path / "elsewhere")
    (run / "elastic").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"its folder is a link"):
        Journal(run).open_job(None, lambda: tmp_path / "new.json")
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"first": ' + "9" * 5000 + "}",
        '{"first": 2, "loss": 5, "gradient_norm": []}',
        '{"first": 2, "loss": [[]], "gradient_norm": []}',
        '{"trained": "x"}',
        '{"ended": {}}',
        '{"first_step": -1}',
        "null",
        "\x00\x1b",
    ],
)
def test_lines_that_nobody_has_noted_are_passed_over(tmp_path: Path, line: str) -> None:
    journal = Journal(tmp_path)
    pen = begin(journal, 2, 0, 0)
    note(pen, first=1, loss=[1.0], gradient_norm=[2.0])
    with pen.open("a") as file:
        file.write(line + "\n")
    note(pen, first=2, loss=[3.0], gradient_norm=[4.0])
    (tmp_path / "elastic" / "part-xyz.jsonl").touch()
    (tmp_path / "elastic" / "part-0001.jsonl").write_text(line + "\n")
    assert journal.story().loss == [1.0, 3.0]
    assert [part.ended for part in journal.story().parts] == [UNKNOWN]
