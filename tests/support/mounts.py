"""Disks that one test sees alone: a tmpfs in a mount namespace of its own. Only root can make them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NEW_NAMESPACE = 0x00020000
_REMOUNT, _RECURSIVE, _PRIVATE = 32, 1 << 14, 1 << 18


def refusal() -> str | None:
    """Why there can be none here; None where there can."""
    child = os.fork()
    if child == 0:
        try:
            leave()
            mount_tmpfs(Path("/tmp"), 1 << 20)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return None if os.waitpid(child, 0)[1] == 0 else "needs root and mount namespaces"


def leave() -> None:
    """This thread, and those that it starts, see from now on what they mount, and nobody else does."""
    _call("unshare", _NEW_NAMESPACE)
    _call("mount", None, b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None)


def mount_tmpfs(place: Path, size: int, *, again: bool = False) -> None:
    """An empty disk of `size` bytes; `again`: the one that is there, with another size."""
    flags = ctypes.c_ulong(_REMOUNT if again else 0)
    _call("mount", b"tmpfs", os.fsencode(place), b"tmpfs", flags, f"size={size}".encode())


def _call(name: str, *arguments: object) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
