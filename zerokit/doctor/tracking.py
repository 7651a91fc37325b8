"""The MLflow store (a server, a SQLite file or a folder): whether it is reachable and lets this user in.

MLflow itself is never imported: that takes longer than all the rest, and would create what is missing.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import requests
from urllib3.exceptions import HTTPError

from zerokit.bench.tracking.schema import is_database, sqlite_path, wrong_schema
from zerokit.doctor.findings import Finding, Verdict, fault, finding, ok, skipped
from zerokit.errors import root_of
from zerokit.files import nearest
from zerokit.patience import within
from zerokit.text import without_secrets

QUICK_SECONDS, PATIENT_SECONDS = 0.7, 5.0
"""Limits of a single read from a server, in a quick look and in a patient one."""
_ALL_SECONDS = {True: 1.0, False: 15.0}
"""Limits of the whole look, quick or not: names may take long to resolve, and a server may send a byte now and then."""
_MOST_BYTES = 1 << 16
_READ = "api/2.0/mlflow/experiments/search?max_results=1"
"""As MLflow's clients ask: what begins with /api is guarded by the server's checks of host name and user."""


@dataclass(frozen=True, slots=True)
class Tracking:
    """The facts about the store."""

    uri: str  # where it is, without a password
    kind: str  # "server", "SQLite", "folder", or "other" for what cannot be looked at from here
    error: str | None = None  # why it cannot be used; None where nothing is wrong
    remedy: str | None = None  # what to do about a schema that is not the installed MLflow's
    status: int | None = None  # the HTTP status of a server that refused
    reached: bool = True  # whether there is a store, or a place for a new one


Trouble = dict[str, Any]
"""Fields of `Tracking` that say what is wrong; none where nothing is."""


def look_at_tracking(uri: str, *, quick: bool) -> Tracking:
    """Contact the store, and change nothing in it; `quick` waits less."""
    scheme, _, rest = uri.partition(":")
    look: Callable[[], Trouble]
    if scheme in ("http", "https"):
        kind, look = "server", partial(_server, uri, QUICK_SECONDS if quick else PATIENT_SECONDS)
    elif scheme.partition("+")[0] == "sqlite":
        kind, look = "SQLite", partial(_sqlite, uri)
    elif scheme == "file" or ("://" not in uri and uri not in ("databricks", "databricks-uc")):
        path = Path(urllib.request.url2pathname(rest) if scheme == "file" else uri).absolute()
        kind, look = "folder", partial(_folder, path)
    else:
        kind, look = "other", partial(_database, uri)
    try:
        trouble = within(look, _ALL_SECONDS[quick])
    except TimeoutError as error:
        trouble = {"error": str(error), "reached": False}
    return Tracking(without_secrets(uri).replace("***@", ""), kind, **trouble)


def _database(uri: str) -> Trouble:
    """Only the schema: a driver that is missing or a server that refuses says nothing of MLflow."""
    with contextlib.suppress(Exception):  # each driver has errors of its own
        return _schema(uri) if is_database(uri) else {}
    return {}


def _schema(uri: str) -> Trouble:
    wrong = wrong_schema(uri)
    return {"error": wrong[0], "remedy": wrong[1]} if wrong is not None else {}


def _server(uri: str, seconds: float) -> Trouble:
    """Ask with the user and certificates that MLflow's own client would use."""
    more: dict[str, Any] = {"headers": {"Accept-Encoding": "identity"}}
    user, password, token = (
        os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD", "TOKEN")
    )
    if user is not None and password is not None:
        more["auth"] = (user, password)
    elif token:
        more["headers"] |= {"Authorization": f"Bearer {token}"}
    insecure = os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("1", "true")
    more["verify"] = not insecure and (os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or True)
    try:
        address = f"{uri.partition('?')[0].rstrip('/')}/{_READ}"
        with requests.get(address, timeout=seconds, stream=True, **more) as answer:
            if answer.status_code == 200:
                return {}
            text = answer.raw.read(_MOST_BYTES, decode_content=False).decode(errors="replace")
    except requests.Timeout:
        return {"error": f"no answer within {seconds:g} s", "reached": False}
    except ValueError:  # its text would show the password
        return {"error": "not a valid address", "reached": False}
    except (OSError, HTTPError) as error:
        root = root_of(error)
        return {"error": str(getattr(root, "strerror", None) or root).rpartition("] ")[2], "reached": False}
    reason = f"HTTP {answer.status_code}: {' '.join(text.split())[:200]}"
    return {"error": reason, "status": answer.status_code}


def _sqlite(uri: str) -> Trouble:
    try:
        path = sqlite_path(uri)
    except ValueError as error:
        return {"error": str(error), "reached": False}
    if path is None:
        return {}
    if path.exists():
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=QUICK_SECONDS)) as database:
                database.execute("PRAGMA schema_version").fetchone()
            wrong = _schema(uri)
        except sqlite3.Error as error:
            return {"error": str(error), "reached": False}
        if wrong:
            return wrong
        if not os.access(path, os.W_OK):
            return {"error": f"{path}: Permission denied"}
    return _folder(path.absolute().parent)  # for the journal


def _folder(folder: Path) -> Trouble:
    """Whether files can be made there, or where the folder would be made."""
    existing = nearest(folder)
    if not existing.is_dir():
        return {"error": f"{existing} is not a directory", "reached": False}
    try:
        with tempfile.TemporaryFile(dir=existing):
            return {}
    except OSError as error:
        return {"error": f"{existing}: {error.strerror}"}


def judge_tracking(tracking: Tracking) -> list[Finding]:
    """ZD801, and if the store was reached, ZD802 of a server and ZD803 of files."""
    if tracking.kind == "other" and tracking.error is None:
        unknown = skipped(f"{tracking.uri}: a store of this kind cannot be checked from here")
        return [finding("ZD801", unknown)]
    if not tracking.reached or (tracking.status or 0) >= 500:
        lost = "Benches keep their records and lose nothing, but write no MLflow runs until it works."
        remedy = "correct MLFLOW_TRACKING_URI or --tracking-uri"
        if tracking.kind == "server":
            remedy = f"start the server (mlflow server), or {remedy}; look at firewalls, proxies and gateways"
        return [finding("ZD801", fault(f"{tracking.uri}: {tracking.error}", lost, remedy))]
    answers = "answers" if tracking.kind == "server" else "can be opened"
    reached = finding("ZD801", ok(f"{tracking.kind} at {tracking.uri} {answers}"))
    if tracking.kind == "server":
        return [reached, finding("ZD802", _judge_access(tracking))]
    return [reached, finding("ZD803", _judge_writes(tracking))]


def _judge_access(tracking: Tracking) -> Verdict:
    if tracking.error is None:
        return ok("lets us in")
    if "invalid host header" in tracking.error.lower():
        host = urllib.parse.urlsplit(tracking.uri).netloc
        return fault(
            tracking.error,
            f"The server does not know the name {host}, by which it was asked, and takes the request for a DNS "
            "rebinding attack.",
            f"start it with mlflow server --allowed-hosts {host},localhost:* (or MLFLOW_SERVER_ALLOWED_HOSTS)",
        )
    if tracking.status in (401, 403):
        return fault(
            tracking.error,
            "The server, or a gateway before it, refuses this user.",
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )
    return fault(tracking.error, "The server is not MLflow.", "correct MLFLOW_TRACKING_URI")


def _judge_writes(tracking: Tracking) -> Verdict:
    if tracking.error is None:
        return ok("possible")
    remedy = tracking.remedy or "give this user write access, or choose another store"
    return fault(tracking.error, "Runs cannot be written.", remedy)
