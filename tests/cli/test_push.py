"""`zerokit push`, and benches whose tracking server is down, slow, or says no."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.bench.records import make_cell, make_record
from tests.cli.commands import zerokit
from tests.cli.inside import zerokit_inside
from zerokit.bench.record.record import write_record
from zerokit.bench.tracking.push import Found, Tracker
from zerokit.bench.tracking.store import Tracking
from zerokit.cli import cli

# MLflow and what it imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

Serve = Callable[[int, float], tuple[str, list[str]]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A server that gives every request this status after this many seconds: its address, and what it was asked."""
    servers = []
    over = threading.Event()

    def start(status: int, seconds: float) -> tuple[str, list[str]]:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                over.wait(seconds)
                body = json.dumps({"error_code": "PERMISSION_DENIED", "message": "not you"}).encode()
                with contextlib.suppress(BrokenPipeError):  # nobody waited for it
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, format: str, *arguments: object) -> None:
                """Nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", asked

    yield start
    over.set()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("status", "seconds", "told"), [(403, 0.0, "not you"), (200, 30.0, "timed out")])
def test_a_server_that_does_not_serve_is_told_once_and_left_alone(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, status: int, seconds: float, told: str
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address, asked = serve(status, seconds)
    warnings: list[str] = []
    tracker = Tracker(Tracking(address, "e"), lambda records: {}, warnings.append, "zerokit push R")
    found = Found([(Path("R"), make_record())], {}, [])
    tracker.push(found)
    assert tracker.lost
    (warning,) = warnings
    what, advice = warning.split("\n")
    assert what.startswith(f"MLflow at {address} cannot be used: ")
    assert told in what
    assert (
        advice == "no result is lost, because records are on disk. When MLflow is reachable: zerokit push R"
    )
    before = len(asked)
    assert before
    tracker.push(found)
    assert len(asked) == before  # it did not ask again
    assert len(warnings) == 1


def test_push_says_what_it_did_and_fails_in_plain_words(tmp_path: Path, serve: Serve) -> None:
    write_record(make_cell(), tmp_path / "records" / "a.json")
    write_record(make_cell("ddp", 0), tmp_path / "records" / "b.json")
    address, _ = serve(403, 0.0)
    refused = zerokit_inside(tmp_path, "push", "records", MLFLOW_TRACKING_URI=address)
    assert refused.returncode == 1
    assert "zerokit: MLflow at http://127.0.0.1:" in refused.stderr
    assert "not you" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.stdout == ""

    (tmp_path / "records" / "c.json").write_text("{}")
    done = zerokit(tmp_path, "push", "records", "--experiment", "mine")
    assert done.returncode == 1
    assert [line.partition(" records/")[0].strip() for line in done.stderr.splitlines()] == [
        "not a record",
        "pushed",
        "pushed",
    ]
    assert " records/c.json: not a bench record" in done.stderr
    assert done.stdout.splitlines() == [
        "1 not a record, 2 pushed: experiment mine at sqlite:///mlflow.db",
        "serve   mlflow ui --backend-store-uri sqlite:///mlflow.db",
        done.stdout.splitlines()[-1],
    ]
    assert re.fullmatch(
        r"open    http://127\.0\.0\.1:5000/#/experiments/1/runs/[0-9a-f]{32}", done.stdout.splitlines()[-1]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "Missing argument"), (["nowhere"], "nowhere does not exist"), (["."], "has no record")],
)
def test_wrong_use_of_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["push", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []
