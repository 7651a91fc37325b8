"""The MLflow store (a server, a SQLite file or a folder): whether it is reachable and writable.

MLflow itself is never imported: that takes longer than all the rest, and would create what is missing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import tempfile
import urllib.parse
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

from zerokit.doctor.findings import Finding, Verdict, finding
from zerokit.doctor.http import Answer, Server, excerpt
from zerokit.text import without_secrets

QUICK_SECONDS, PATIENT_SECONDS = 0.7, 5.0
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


@dataclass(frozen=True, slots=True)
class Tracking:
    """The facts about the store.

    Attributes:
        uri: where it is, without a password.
        kind: "server", "SQLite", "folder", "database", "address" where it is none, or "other" for what cannot be looked
            at from here.
        reached: whether it answered; None where that was not tried.
        version: MLflow's, of a server; or the schema's, of a database.
        status: the HTTP status of the first request that was refused.
        error: the message of what went wrong.
        host: the server's name in requests.
        writable: None where that was not tried.
        write_error: why it is not.
    """

    uri: str
    kind: str
    reached: bool | None
    version: str | None = None
    status: int | None = None
    error: str | None = None
    host: str | None = None
    writable: bool | None = None
    write_error: str | None = None


def look_at_tracking(uri: str, *, quick: bool) -> Tracking:
    """Contact the store; `quick` waits less and writes nothing."""
    shown = without_secrets(uri).replace("***@", "")
    seconds = QUICK_SECONDS if quick else PATIENT_SECONDS
    try:
        parts = urllib.parse.urlsplit(shown)  # of a password, no part is a port
        port = parts.port
    except ValueError as error:
        return Tracking(shown, "address", False, error=str(error))
    scheme = parts.scheme.partition("+")[0]
    if scheme in ("http", "https"):
        server = Tracking(shown, "server", True, host=parts.netloc.rpartition("@")[2])
        try:
            return _server(server, Server(uri, seconds), quick)
        except (OSError, ValueError) as error:
            return replace(server, reached=False, error=str(error))
    if scheme == "sqlite":
        # sqlite:///relative and sqlite:////absolute, as SQLAlchemy reads them.
        path = Path(urllib.parse.unquote(uri.partition("///")[2].partition("?")[0])).absolute()
        database = Tracking(shown, "SQLite", True)
        return _sqlite(database, path) if path.exists() else _folder(database, path.parent)
    if scheme in ("", "file"):
        folder = Path(urllib.request.url2pathname(parts.path)) if scheme else Path(uri)
        return _folder(Tracking(shown, "folder", True), folder.absolute())
    if scheme in _PORTS and parts.hostname:
        database = Tracking(shown, "database", True, host=parts.hostname)
        try:
            socket.create_connection((parts.hostname, port or _PORTS[scheme]), seconds).close()
        except OSError as error:
            return replace(database, reached=False, error=error.strerror or str(error))
        return database
    return Tracking(shown, "other", None)


def _server(found: Tracking, server: Server, quick: bool) -> Tracking:
    version = server.get("version")
    if version.failed and version.status != 404:  # a gateway need not have this address
        return _refused(found, version)
    found = replace(found, version=excerpt(version.text)[:40] if version.status == 200 else None)
    read = server.read()
    if read.status != 200:
        return _refused(found, read)
    written = None if quick else server.write(read)
    if written is None:
        return found
    if written.status in (None, 401, 403) or written.status >= 500:
        return _refused(found, written)
    why = None if written.status == 200 else f"HTTP {written.status}: {excerpt(written.text)}"
    return replace(found, writable=why is None, write_error=why)


def _refused(found: Tracking, answer: Answer) -> Tracking:
    return replace(
        found,
        reached=answer.status is not None,
        status=answer.status,
        error=answer.error or excerpt(answer.text),
    )


def _sqlite(found: Tracking, path: Path) -> Tracking:
    try:
        address = f"file:{urllib.parse.quote(str(path))}?mode=rw"
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=QUICK_SECONDS)) as database:
            database.execute("PRAGMA schema_version").fetchone()
            with contextlib.suppress(sqlite3.OperationalError):  # a database that is not MLflow's yet
                row = database.execute("SELECT version_num FROM alembic_version").fetchone()
                found = replace(found, version=None if row is None else f"schema {row[0]}")
            # Takes the lock that a write takes, and changes nothing.
            database.execute("BEGIN IMMEDIATE")
            database.rollback()
    except sqlite3.OperationalError as error:
        return replace(found, writable=False, write_error=str(error))
    except sqlite3.DatabaseError as error:
        return replace(found, reached=False, error=str(error))
    if not os.access(path, os.W_OK):
        return replace(found, writable=False, write_error="Permission denied")
    return _folder(found, path.parent)  # for the journal


def _folder(found: Tracking, folder: Path) -> Tracking:
    """Whether files can be made there, or where the folder would be made."""
    existing = next(one for one in (folder, *folder.parents) if os.path.exists(one))
    if not existing.is_dir():
        return replace(found, reached=False, error=f"{existing} is not a directory")
    try:
        with tempfile.TemporaryFile(dir=existing):
            return replace(found, writable=True)
    except OSError as error:
        return replace(found, writable=False, write_error=f"{existing}: {error.strerror}")


def judge_tracking(tracking: Tracking) -> list[Finding]:
    """ZD801, and if the store was reached, ZD802 and ZD803."""
    if tracking.reached is None:
        return [
            finding(
                "ZD801", Verdict.skipped(f"{tracking.uri}: a store of this kind cannot be checked from here")
            )
        ]
    if not tracking.reached or (tracking.status or 0) >= 500:
        return [finding("ZD801", _judge_silence(tracking))]
    version = f" (MLflow {tracking.version})" if tracking.kind == "server" and tracking.version else ""
    version = version or (f" ({tracking.version})" if tracking.version else "")
    does = "answers" if tracking.host is not None else "can be opened"
    findings = [finding("ZD801", Verdict.ok(f"{tracking.kind} at {tracking.uri} {does}{version}"))]
    if tracking.kind == "server":
        findings.append(finding("ZD802", _judge_access(tracking)))
        if tracking.status is not None:
            return findings
    return [*findings, finding("ZD803", _judge_writes(tracking))]


def _judge_silence(tracking: Tracking) -> Verdict:
    lost = "Benches keep their records and lose nothing, but write no MLflow runs"
    if tracking.status is not None:
        return Verdict.fault(
            f"{tracking.uri}: HTTP {tracking.status}: {tracking.error}",
            f"The server, or a gateway before it, fails. {lost} until it works.",
            "look at the server's log; zerokit push sends the runs later",
        )
    if tracking.kind in ("server", "database"):
        return Verdict.fault(
            f"{tracking.uri}: {tracking.error}",
            f"No server answers there. {lost} until one does.",
            "start the server (mlflow server), or correct MLFLOW_TRACKING_URI; look at firewalls and proxies",
        )
    return Verdict.fault(
        f"{tracking.uri}: {tracking.error}", f"{lost}.", "correct MLFLOW_TRACKING_URI or --tracking-uri"
    )


def _judge_access(tracking: Tracking) -> Verdict:
    if tracking.status is None:
        return Verdict.ok(f"lets us in as {tracking.host}")
    listed = f"HTTP {tracking.status}: {tracking.error}"
    if "invalid host header" in (tracking.error or "").lower():
        return Verdict.fault(
            listed,
            f"The server does not know the name {tracking.host}, by which it was asked, and takes the request for a "
            "DNS rebinding attack.",
            f"start it with mlflow server --allowed-hosts {tracking.host},localhost:* "
            "(or MLFLOW_SERVER_ALLOWED_HOSTS)",
        )
    if tracking.status in (401, 403):
        return Verdict.fault(
            listed,
            "The server, or a gateway before it, refuses this user.",
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; request write access",
        )
    return Verdict.fault(listed, "The server is not MLflow.", "correct MLFLOW_TRACKING_URI")


def _judge_writes(tracking: Tracking) -> Verdict:
    if tracking.writable is None:
        return Verdict.skipped("not tried")
    if tracking.writable:
        return Verdict.ok("possible")
    if "locked" in (tracking.write_error or ""):
        return Verdict.warning(
            f"{tracking.uri}: {tracking.write_error}",
            "Another process writes there at this moment; over NFS, locks may remain forever.",
            "close it, or use a server: mlflow server --backend-store-uri …",
        )
    return Verdict.fault(
        f"{tracking.uri}: {tracking.write_error}",
        "Runs cannot be written.",
        "give this user write access, or choose another store",
    )
