"""`zerokit push`, and benches whose tracking server is down, slow, or says no."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

from tests.bench.records import make_cell, make_record
from tests.cli.inside import zerokit_inside
from tests.support.serving import serving
from zerokit.bench.record.record import write_record
from zerokit.bench.tracking.push import Found, Tracker
from zerokit.bench.tracking.store import Tracking

# MLflow and what it imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

NOT_YOU = json.dumps({"error_code": "PERMISSION_DENIED", "message": "not you"})


@pytest.mark.parametrize(
    ("status", "seconds", "told"),
    [(403, 0.0, "not you"), (503, 0.0, "too many 503 error responses"), (200, 30.0, "timed out")],
)
def test_a_server_that_does_not_serve_is_told_once_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, status: int, seconds: float, told: str
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    over = threading.Event()

    def says(*request: str) -> tuple[int, str]:
        over.wait(seconds)
        return status, NOT_YOU

    with serving(says) as (address, asked):
        warnings: list[str] = []
        tracker = Tracker(Tracking(address, "e"), warnings.append, "zerokit push R")
        found = Found([(Path("R"), make_record())], {}, [])
        tracker.push(found)
        assert tracker.lost
        (warning,) = warnings
        what, advice = warning.split("\n")
        assert what.startswith(f"MLflow at {address} cannot be used: ")
        assert told in what
        assert (
            advice
            == "no result is lost, because records are on disk. When MLflow is reachable: zerokit push R"
        )
        before = len(asked)
        assert before
        tracker.push(found)
        assert len(asked) == before  # it did not ask again
        assert len(warnings) == 1
        over.set()


def test_push_says_what_it_did_and_fails_in_plain_words(tmp_path: Path, mlflow_uri: str) -> None:
    write_record(make_cell(), tmp_path / "records" / "a.json")
    write_record(make_cell("ddp", 0), tmp_path / "records" / "b.json")
    with serving(lambda *_: (403, NOT_YOU)) as (address, _):
        refused = zerokit_inside(tmp_path, "push", "records", MLFLOW_TRACKING_URI=address)
    assert refused.returncode == 1
    assert "zerokit: MLflow at http://127.0.0.1:" in refused.stderr
    assert "not you" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.stdout == ""

    (tmp_path / "records" / "c.json").write_text("{")
    (tmp_path / "records" / "d.json").write_text("{}")  # no record, and none of ours
    done = zerokit_inside(tmp_path, "push", "records", "--experiment", "mine", "--tracking-uri", mlflow_uri)
    assert done.returncode == 1
    assert [line.partition(" records/")[0].strip() for line in done.stderr.splitlines()] == [
        "not a record",
        "pushed",
        "pushed",
    ]
    assert " records/c.json: not a bench record" in done.stderr
    assert done.stdout.splitlines() == [
        f"1 not a record, 2 pushed: experiment mine at {mlflow_uri}",
        f"serve   mlflow ui --backend-store-uri {mlflow_uri}",
        done.stdout.splitlines()[-1],
    ]
    assert re.fullmatch(
        r"open    http://127\.0\.0\.1:5000/#/experiments/\d+/runs/[0-9a-f]{32}\?\S+",
        done.stdout.splitlines()[-1],
    )
