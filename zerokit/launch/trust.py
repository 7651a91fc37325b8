"""How processes that another launcher has started know each other, before one does what another says.

On one machine they meet at a Unix socket, where the system says whose process is at the other end: it must be this
user's. Between machines they meet at a port that anybody may reach, and prove that they know one secret, which their
launcher gives to all of them in the environment. Messages are neither hidden nor signed: who can change them on their
way is trusted (SECURITY.md).
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time

from zerokit.errors import UsageError
from zerokit.launch.failures import LaunchError

SECRET = "ZEROKIT_SECRET"
_LEAST = 16
_SIZE = 32
_SECONDS = 10.0


def shared_secret(scheme: str) -> bytes:
    """The secret of this job; raises `UsageError` if there is none."""
    secret = os.environ.get(SECRET, "")
    if len(secret) < _LEAST:
        found = f"has {len(secret)} letters, fewer than {_LEAST}" if secret else "is not set"
        raise UsageError(
            f"{scheme} started processes on several machines, which know each other by a secret, but {SECRET} {found}: "
            f"give all of them the same, as by `export {SECRET}=$(openssl rand -hex 16)` before srun, torchrun on each "
            f"node with one value, or mpirun -x {SECRET}"
        )
    return secret.encode()


def same_user(connection: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def admit(connection: socket.socket, secret: bytes) -> bool:
    """Prove to the other end that this one knows the secret, and tell whether that does; for who listens."""
    own, deadline = secrets.token_bytes(_SIZE), time.monotonic() + _SECONDS
    try:
        theirs = _receive(connection, deadline)
        connection.sendall(own + _proof(secret, b"leads", theirs, own))
        return hmac.compare_digest(_receive(connection, deadline), _proof(secret, b"follows", theirs, own))
    except OSError:
        return False


def introduce(connection: socket.socket, secret: bytes, where: str) -> None:
    """The other part of `admit`. Raises `LaunchError` if the other end does not know the secret, and `OSError`."""
    own, deadline = secrets.token_bytes(_SIZE), time.monotonic() + _SECONDS
    connection.sendall(own)
    theirs, proof = _receive(connection, deadline), _receive(connection, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"leads", own, theirs)):
        raise LaunchError(
            f"who answers at {where} does not know this job's {SECRET}: give all nodes the same"
        )
    connection.sendall(_proof(secret, b"follows", own, theirs))


def _proof(secret: bytes, role: bytes, *drawn: bytes) -> bytes:
    return hmac.digest(secret, b"zerokit " + role + b"".join(drawn), "sha256")


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """The next `_SIZE` bytes; raises `OSError` if they do not come in time."""
    content = b""
    while len(content) < _SIZE:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(_SIZE - len(content))
        if not piece or time.monotonic() > deadline:
            raise ConnectionAbortedError(
                "the connection ended before both have shown that they belong together"
            )
        content += piece
    return content
