"""An MLflow server, queried over HTTP without MLflow: its version, its access rights, and whether it accepts writes.

`/health` and `/version` are open to all; what begins with `/api` is guarded by the server's checks of host name,
origin and user.
"""

from __future__ import annotations

import json
import os
import urllib.parse
from dataclasses import dataclass
from typing import Any

import requests
import urllib3

from zerokit.doctor.names import within

_API = "api/2.0/mlflow"
_TAG = "zerokit.doctor"
_EXCERPT = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request: the status and the text, or the error."""

    status: int | None
    text: str
    error: str | None = None

    @property
    def failed(self) -> bool:
        """Whether there was none, or a refusal."""
        return self.status is None or self.status >= 400

    def json(self) -> dict[str, Any]:
        """The text's JSON object; empty if it is not one."""
        try:
            content = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}


class Server:
    """A server, with the user and certificates that MLflow's own client would use; `timeout_s` is of each request."""

    def __init__(self, uri: str, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(uri)
        base = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
        self._base, self._timeout_s = base.geturl().rstrip("/"), timeout_s
        self._session = requests.Session()
        user = parts.username or os.environ.get("MLFLOW_TRACKING_USERNAME")
        password = parts.password or os.environ.get("MLFLOW_TRACKING_PASSWORD")
        if user is not None and password is not None:
            self._session.auth = (user, password)
        elif token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
            self._session.headers["Authorization"] = f"Bearer {token}"
        self._verify: bool | str = os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or True
        if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("1", "true"):
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
            self._verify = False

    def get(self, path: str) -> Answer:
        """Get `path`."""
        return self._ask("GET", path, None)

    def post(self, path: str, content: dict[str, str]) -> Answer:
        """Send JSON to `path`."""
        return self._ask("POST", path, content)

    def _ask(self, method: str, path: str, content: dict[str, str] | None) -> Answer:
        """The answer, if all of it comes in time: a time-out of sockets begins anew with every byte."""
        how: dict[str, Any] = {"json": content, "timeout": self._timeout_s, "verify": self._verify}
        try:
            answer = within(
                lambda: self._session.request(method, f"{self._base}/{path}", **how), 2 * self._timeout_s
            )
        except requests.Timeout:
            return Answer(None, "", f"no answer within {self._timeout_s:g} s")
        except TimeoutError:
            return Answer(None, "", f"no whole answer within {2 * self._timeout_s:g} s")
        except (OSError, ValueError) as error:
            return Answer(None, "", _describe(error))
        return Answer(answer.status_code, answer.text)

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


def _describe(error: Exception) -> str:
    """What went wrong at the root, which requests and urllib3 wrap."""
    wrapped: Any = error.args[0] if error.args else error
    if isinstance(wrapped, urllib3.exceptions.ProtocolError):
        return f"no HTTP: {str(wrapped)[:80]}"
    root: BaseException = error
    while (below := root.__cause__ or root.__context__) is not None:
        root = below
    what = str(getattr(root, "strerror", None) or root).rpartition("] ")[2]
    return (
        f"the proxy (HTTP_PROXY, NO_PROXY): {what}"
        if isinstance(error, requests.exceptions.ProxyError)
        else what
    )


def excerpt(text: str) -> str:
    """The start of an answer, on one line."""
    return " ".join(text.split())[:_EXCERPT]
