"""An MLflow server, queried over HTTP without MLflow: its version, its access rights, and whether it accepts writes.

`/health` and `/version` are open to all; what begins with `/api` is guarded by the server's checks of host name,
origin and user.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

_API = "api/2.0/mlflow"
_TAG = "zerokit.doctor"
_EXCERPT = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request: the status and the start of the text, or the error."""

    status: int | None
    text: str
    error: str | None = None

    def json(self) -> dict[str, Any]:
        """The text's JSON object; empty if it is not one."""
        try:
            content = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


class Server:
    """A server, with the user and certificates that MLflow's own client would use.

    Args:
        uri: with or without a user and a password.
        timeout_s: of each request.
    """

    def __init__(self, uri: str, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(uri)
        user, password = parts.username, parts.password
        self._base = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        token = os.environ.get("MLFLOW_TRACKING_TOKEN")
        user = user or os.environ.get("MLFLOW_TRACKING_USERNAME")
        password = password or os.environ.get("MLFLOW_TRACKING_PASSWORD")
        if user is not None and password is not None:
            self._headers["Authorization"] = (
                "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
            )
        elif token:
            self._headers["Authorization"] = f"Bearer {token}"
        handlers: list[urllib.request.BaseHandler] = [_Redirects()]
        if parts.scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=_certificates()))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str) -> Answer:
        """Get `path`."""
        return self._ask(path, None)

    def post(self, path: str, content: dict[str, str]) -> Answer:
        """Send JSON to `path`."""
        return self._ask(path, json.dumps(content).encode())

    def _ask(self, path: str, content: bytes | None) -> Answer:
        """The answer, if all of it comes in time: a time-out of sockets begins anew with every byte."""
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        threading.Thread(target=lambda: answers.put(self._request(path, content)), daemon=True).start()
        try:
            return answers.get(timeout=2 * self._timeout_s)
        except queue.Empty:
            return Answer(None, "", f"no whole answer within {2 * self._timeout_s:g} s")

    def _request(self, path: str, content: bytes | None) -> Answer:
        address = f"{self._base.rstrip('/')}/{path}"
        try:
            request = urllib.request.Request(address, content, self._headers)
            with self._opener.open(request, timeout=self._timeout_s) as response:
                return Answer(response.status, response.read(1 << 20).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.read(1 << 16).decode(errors="replace"))
        except TimeoutError:
            return Answer(None, "", f"no answer within {self._timeout_s:g} s")
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                return Answer(None, "", f"no answer within {self._timeout_s:g} s")
            reason = error.reason
            return Answer(None, "", getattr(reason, "strerror", None) or str(reason))
        except (OSError, ValueError, urllib.error.ContentTooShortError) as error:
            return Answer(None, "", str(error) or type(error).__name__)
        except Exception as error:  # http.client raises its own for what is no HTTP at all
            return Answer(None, "", f"no HTTP: {type(error).__name__}: {str(error)[:80]}")

    def read(self) -> Answer:
        """Get one experiment, as MLflow's clients do."""
        return self.get(f"{_API}/experiments/search?max_results=1")

    def write(self, listed: Answer) -> Answer | None:
        """Set and remove a tag of the experiment that `read` found; None if there is none.

        A server older than MLflow 3 cannot remove it: the tag then stays; its value is "may be removed".
        """
        experiments = listed.json().get("experiments")
        first = experiments[0] if isinstance(experiments, list) and experiments else None
        if not isinstance(first, dict) or "experiment_id" not in first:
            return None
        tag = {"experiment_id": str(first["experiment_id"]), "key": _TAG}
        written = self.post(f"{_API}/experiments/set-experiment-tag", {**tag, "value": "may be removed"})
        if written.status == 200:
            self.post(f"{_API}/experiments/delete-experiment-tag", tag)
        return written


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the user and the password go to the scheme, host and port that they are meant for alone."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> Any:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and _origin(request.full_url) != _origin(req.full_url):
            request.remove_header("Authorization")
        return request


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _certificates() -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"))
    if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("1", "true"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def excerpt(text: str) -> str:
    """The start of an answer, on one line."""
    return " ".join(text.split())[:_EXCERPT]
