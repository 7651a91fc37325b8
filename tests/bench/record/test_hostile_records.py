"""Records that are damaged or made up: an error with the file's name, or figures; never a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bench.records import make_cell, make_record, make_timeline
from tests.cli.inside import zerokit_inside
from tests.support.mutations import mutated, put
from zerokit.bench.record.measured import Checkpoints, Save
from zerokit.bench.record.record import Record, RecordError, Run, read_record, write_record
from zerokit.bench.record.status import Status
from zerokit.bench.report import render
from zerokit.bench.tracking.content import run_name, run_params, run_points, run_tags
from zerokit.bench.tracking.push import Mirror
from zerokit.bench.tracking.store import Store
from zerokit.cli import cli

EVIL = "\x1b]0;title\x07\x1b[2J\u202e\u2028\x9b31m[/]\r\nzerokit: all is well"
FULL = replace(
    make_cell(device="cuda"), checkpoints=Checkpoints(3, 5.0, [Save(3, 4.0, 100)]), timeline=make_timeline()
)
PLAIN: dict[str, Any] = json.loads(FULL.to_json())


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


REFUSED: list[tuple[Callable[[Any], object], str]] = [
    (lambda plain: plain.pop("cell"), "cell: missing"),
    (lambda plain: plain["ranks"][1].pop("pid"), r"ranks\[1\].pid: missing"),
    (put("status", value="fine"), "status"),
    (put("format", value="zerokit.bench/2"), "format 'zerokit.bench/2', expected 'zerokit.bench/1'"),
    (put("traffic", "more", value=1), "traffic.more: no such field"),
    (put("ranks", value={}), "ranks: expected a list, found dict"),
    (put("ranks", 0, "memory_bytes", value=[]), "memory_bytes: expected an object"),
    (put("settings", "stage", value=True), "settings.stage: expected a valid integer, found True"),
    (put("model", value=3), "model: expected an object, found 3"),
    (put("ranks", 1, "rank", value=-1), r"ranks\[1\].rank: expected at least 0, found -1"),
    (put("ranks", 0, "step_ms", 0, value=1e308), r"step_ms\[0\]: expected at most 1e.100"),
    (put("results", "throughput", value=10**400), "throughput: expected at most 1e.100"),
    (put("skipped_steps", value=2**64), "skipped_steps: expected at most 9.2"),
    (put("system", 0, "seconds", value=[]), r"system\[0\].series.cpu_.*: has 23 values at 0"),
    (put("timeline", "seconds", value=[0.0, 1.0]), "timeline.bytes.parameters: has 3 values at 2 moments"),
    (put("timeline", "bytes", value={"all": [1, 2, 3]}), "timeline.bytes: expected param"),
    (
        lambda plain: plain.update(ranks=[rank | {"step_ms": []} for rank in plain["ranks"]]),
        "ranks: window_ms is set, but there are no steps",
    ),
    (put("reason", value="\ud800"), "not a bench record: .*surrogates not allowed"),
    (put("ranks", 0, "step_ms", value=[1.0]), "different numbers of steps"),
    (put("settings", "stage", value=7), "stage 7 is unknown"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_cannot_be_is_refused_with_the_files_name(
    tmp_path: Path, change: Callable[[Any], object], message: str
) -> None:
    plain = copy.deepcopy(PLAIN)
    change(plain)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(RecordError, match=message) as caught:
        read_record(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_deep_nesting_is_refused_at_any_depth(tmp_path: Path) -> None:
    path, sweep = tmp_path / "record.json", tmp_path / "sweep" / "sweep.json"
    for depth in (70, 900, 10_000):
        path.write_text(FULL.to_json().replace('"config": {', f'"config": {{"deep": {nested(depth)}, ', 1))
        for name in ("compare", "push"):
            done = zerokit_inside(tmp_path, name, "record.json")
            assert done.returncode == 1
            assert "record.json: not a bench record" in done.stderr
    write_record(make_record(), tmp_path / "sweep" / "cells" / "000.json")
    for text in (nested(10_000), nested(900), '{"format": "zerokit.sweep/1", "options": ' + nested(30) + "}"):
        sweep.write_text(text)
        done = zerokit_inside(tmp_path, "push", "sweep")
        assert done.returncode == 1
        assert "sweep.json" in done.stderr


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_a_changed_record_is_refused_by_name_or_gives_figures(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(mutated(PLAIN, data)))
    try:
        record = read_record(path)
    except RecordError as error:
        told = str(error)
    else:
        _use(record, path, tmp_path)
        told = f"{path}: "
    assert told.startswith(f"{path}: ")


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Pages without drawings and scripts, and a store that nothing is written to: each takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "svg", lambda picture, width: "")
        patch.setattr(render, "bundle", lambda: "")
        patch.setattr(Store, "__init__", lambda store, tracking: None)
        patch.setattr(Store, "link", lambda store, run_id: "")
        patch.setattr(Mirror, "push", lambda mirror, record: ("new", "a run"))
        yield


def _use(record: Record, path: Path, folder: Path) -> None:
    """Everything that `compare` and `push` make of a record."""
    assert run_name(record.settings)
    run_params(record), run_tags(record), run_points(record)
    other = folder / "other.json"
    write_record(make_record(), other)
    for arguments in ([], ["--json"]):
        done = CliRunner().invoke(cli, ["compare", str(path), str(other), *arguments], catch_exceptions=False)
        assert done.exit_code == 0
    json.loads(done.stdout)
    render.write_comparison([Run("a", (record,)), Run("b", (make_record(),))], folder / "page.html")


def test_names_of_records_cannot_steer_a_terminal(tmp_path: Path) -> None:
    """In tables, in reasons, in errors; JSON is plain ASCII."""
    environment = FULL.environment
    assert environment is not None
    evil = replace(
        FULL,
        id="e" * 32,
        settings=replace(FULL.settings, data=EVIL, save=EVIL),
        environment=replace(environment, processor=EVIL, packages={EVIL: EVIL}, git_commit=EVIL),
    )
    write_record(evil, tmp_path / "evil.json")
    write_record(FULL, tmp_path / "good.json")
    failed = replace(
        FULL,
        status=Status.FAILED,
        reason=EVIL,
        results=None,
        id="f" * 32,
        settings=replace(FULL.settings, stage=1),
    )
    write_record(failed, tmp_path / "failed.json")
    plain = copy.deepcopy(PLAIN)
    plain[EVIL] = 1
    (tmp_path / "bad.json").write_text(json.dumps(plain))
    for arguments, expected in (
        (["compare", "evil.json", "good.json"], 0),
        (["compare", "good.json", "failed.json"], 0),
        (["compare", "bad.json"], 1),
        (["push", "bad.json"], 1),
    ):
        done = zerokit_inside(tmp_path, *arguments)
        assert done.returncode == expected, done.stderr
        told = done.stdout + done.stderr
        assert r"\x1b]0;title\x07\x1b[2J\u202e" in told
        assert all(letter == "\n" or letter.isprintable() for letter in told)
        assert "\nzerokit: all is well" not in told
    out = zerokit_inside(tmp_path, "compare", "evil.json", "good.json", "--json").stdout
    assert out.isascii()
    assert json.loads(out)["cells"][0]["settings"]["data"] == EVIL
