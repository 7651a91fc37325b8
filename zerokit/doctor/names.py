"""The addresses of this host's own name, asked for with a time limit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOKUP_SECONDS = 1.0
"""A name server that does not answer makes `getaddrinfo` wait for many seconds: too long for training."""


def own_addresses() -> list[str]:
    """The addresses of the host's own name. Raises OSError."""
    host = socket.gethostname()
    entries = within(lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM), LOOKUP_SECONDS)
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))


def within(question: Callable[[], T], seconds: float) -> T:
    """The answer, or its error, or a TimeoutError: a lookup cannot be stopped, so its thread is left behind."""
    answers: list[T] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]
