"""Stores that answer, refuse, fail or say nothing: servers on loopback, files, and MLflow's own refusal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.doctor.healthy import bad
from tests.support.serving import serving
from zerokit.doctor import tracking as module
from zerokit.doctor.findings import Finding, Severity
from zerokit.doctor.tracking import judge_tracking, look_at_tracking
from zerokit.network import free_port

HOST_REFUSED = "Invalid Host header - possible DNS rebinding attack detected"


def looked(uri: str, *, quick: bool = False) -> list[Finding]:
    return judge_tracking(look_at_tracking(uri, quick=quick))


def texts(findings: list[Finding]) -> str:
    return " ".join(f"{one.found} {one.meaning} {one.remedy}" for one in findings)


@contextmanager
def mlflow_server(folder: Path) -> Iterator[int]:
    """The port of a real server that knows itself as localhost only."""
    # It binds the port many seconds later: the system must not give it to another process until then.
    port = free_port()
    command = f"server --host 127.0.0.1 --port {port} --workers 1 --backend-store-uri sqlite:///runs.db"
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *command.split(), "--allowed-hosts", f"localhost:{port}"],
        cwd=folder,
        # Its jobs would be eight further processes that import MLflow.
        env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while look_at_tracking(f"http://localhost:{port}", quick=True).reached is False:
            assert process.poll() is None
            time.sleep(0.2)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def test_mlflow_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses a name that it does not know."""
    with mlflow_server(tmp_path) as port:
        uri = f"http://localhost:{port}"
        findings = looked(uri)
        assert bad(findings) == {}
        assert [one.code for one in findings] == ["ZD801", "ZD802"]
        monkeypatch.setattr(module, "QUICK_SECONDS", 5.0)  # on a busy machine it may take longer
        for quick in (True, False):
            findings = looked(f"http://127.0.0.1:{port}", quick=quick)
            assert bad(findings) == {"ZD802": Severity.FAULT}
            assert HOST_REFUSED in findings[-1].found
            assert f"--allowed-hosts 127.0.0.1:{port}" in findings[-1].remedy


@pytest.mark.parametrize(("status", "code"), [(401, "ZD802"), (403, "ZD802"), (418, "ZD802"), (503, "ZD801")])
def test_servers_that_refuse_or_fail(status: int, code: str) -> None:
    with serving(lambda *_: (status, "no")) as (uri, _):
        for quick in (True, False):
            assert bad(looked(uri, quick=quick)) == {code: Severity.FAULT}


def test_passwords_are_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda *_: (401, "no")) as (uri, asked):
        seen = look_at_tracking(uri.replace("http://", "http://me:s3cret@"), quick=False)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
        looked(uri)
    assert asked[0][2].startswith("Basic ")
    assert asked[1][2] == "Bearer t0ken"
    assert "s3cret" not in repr(seen) + texts(judge_tracking(seen))


def test_a_redirect_takes_no_password_elsewhere() -> None:
    with (
        serving(lambda *_: (200, "{}")) as (elsewhere, theirs),
        serving(lambda *_: (302, elsewhere)) as (uri, asked),
    ):
        looked(uri.replace("http://", "http://me:s3cret@"))
    assert asked[0][2].startswith("Basic ")
    assert theirs
    assert {authorization for _, _, authorization in theirs} == {""}


@pytest.mark.parametrize(("word", "said"), [(b"", "no answer within 0.3 s"), (b"SSH-2.0\r\n", "SSH-2.0")])
def test_a_server_that_says_nothing_or_speaks_another_language_does_not_hold_the_doctor(
    monkeypatch: pytest.MonkeyPatch, word: bytes, said: str
) -> None:
    monkeypatch.setattr(module, "PATIENT_SECONDS", 0.3)
    over = threading.Event()
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def speak() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                while not over.wait(0.1):
                    connection.sendall(word)

        thread = threading.Thread(target=speak)
        thread.start()
        findings = looked(f"http://127.0.0.1:{server.getsockname()[1]}")
        over.set()
        thread.join()
    assert bad(findings) == {"ZD801": Severity.FAULT}
    assert said in findings[0].found


def test_nobody_there() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        port = gone.getsockname()[1]
    for login, said in (("me:s3cret", "Connection refused"), ("me:s3cret/", "not a valid address")):
        findings = looked(f"http://{login}@127.0.0.1:{port}")
        assert bad(findings) == {"ZD801": Severity.FAULT}
        assert said in findings[0].found
        assert "s3cret" not in texts(findings)


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bad(looked("sqlite:///new.db")) == {}
    assert bad(looked(f"file://{tmp_path}/runs")) == {}
    assert bad(looked(str(tmp_path / "runs"))) == {}
    assert bad(looked("sqlite:///new/folder/new.db")) == {}
    assert list(tmp_path.iterdir()) == []  # nothing was left
    (tmp_path / "text.db").write_text("no database, but long enough to be looked at" * 20)
    assert bad(looked("sqlite:///text.db")) == {"ZD801": Severity.FAULT}
    for uri in (str(tmp_path / "text.db"), "sqlite:///text.db/new.db"):
        assert bad(looked(uri)) == {"ZD801": Severity.FAULT}
    for uri in ("postgresql://me@host/runs", "databricks"):
        assert looked(uri)[0].severity is Severity.SKIPPED
