"""Descriptors passed between the ranks of one node, over a socket without a path in the file system.

    first rank   door ── accepts everyone, then sends all of it ──────────────┐
    the others   connect, send a window's descriptor, receive the board's and everyone's window's

No rank gets an answer before all have connected. Only processes of the same user are let in.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from types import TracebackType

_PATIENCE_S = 10.0
"""How long ranks of one node, which come from the same collective, may be apart."""


class Door:
    """A listening socket under a random number; raises `OSError` where there are none."""

    def __init__(self) -> None:
        self.number = secrets.randbits(62)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_PATIENCE_S)
        try:
            self._socket.bind(_name(self.number))
            self._socket.listen(1024)
        except OSError:
            self._socket.close()
            raise

    def __enter__(self) -> Door:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def collect(self, count: int, board: int, own: int) -> list[int]:
        """The first rank: hand `board` and all windows to the other `count` − 1 ranks; returns the windows.

        Ranks are identified by their position among the node's. Raises `OSError` if one does not connect; `own`, this
        rank's window, is closed then.
        """
        windows = {0: own}
        with contextlib.ExitStack() as stack:
            try:
                guests = []
                while len(windows) < count:
                    guest = stack.enter_context(self._socket.accept()[0])
                    guest.settimeout(_PATIENCE_S)
                    if not _is_ours(guest):
                        continue
                    message, descriptors = _receive(guest, 1)
                    windows[int.from_bytes(message, "little")] = descriptors[0]
                    guests.append(guest)
                if set(windows) != set(range(count)):
                    raise ConnectionError(f"ranks {sorted(windows)} came instead of {count}")
                ordered = [windows[position] for position in range(count)]
                for guest in guests:
                    socket.send_fds(guest, [b"all"], [board, *ordered])
            except OSError:
                close_all(list(windows.values()))
                raise
        return ordered


def join(door: int, position: int, count: int, own: int) -> tuple[int, list[int]]:
    """The other ranks: send `own` window to the door under that number; returns the board and all windows.

    Raises `OSError` if that does not work. This rank's own window comes back under another descriptor.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_PATIENCE_S)
        connection.connect(_name(door))
        if not _is_ours(connection):
            raise PermissionError("another user listens there")
        socket.send_fds(connection, [position.to_bytes(8, "little")], [own])
        _, descriptors = _receive(connection, count + 1)
        return descriptors[0], descriptors[1:]


def close_all(descriptors: Sequence[int]) -> None:
    """Close them."""
    for descriptor in descriptors:
        os.close(descriptor)


def _receive(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    message, descriptors, _, _ = socket.recv_fds(connection, 8, count, socket.MSG_CMSG_CLOEXEC)
    if len(descriptors) != count:
        close_all(descriptors)
        raise ConnectionError(f"{len(descriptors)} descriptors came instead of {count}")
    return message, descriptors


def _is_ours(connection: socket.socket) -> bool:
    credentials = struct.Struct("3i")
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    user: int = credentials.unpack(packed)[1]
    return user == os.geteuid()


def _name(number: int) -> bytes:
    return b"\0zerokit-%016x" % number
