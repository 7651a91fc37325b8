"""Reading another process's memory (Linux's cross-memory attach).

A byte on loopback is copied into the kernel by one rank and out of it by another; `process_vm_readv` copies it once,
and tensors may lie anywhere. The kernel's rules for debuggers apply: the same user, a process that may
be dumped, no sandbox that forbids the call. Under Yama's `ptrace_scope` 1, Ubuntu's default, a process must name whom
it lets in besides its ancestors: `let_siblings_in` names the launcher, which lets in what the launcher started.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

SWITCH = "ZEROKIT_CMA"
"""Environment variable: 0 lets the ranks of a node send through sockets, as nodes do; "shared" asks for windows."""

_MOST_BYTES = 1 << 30
"""The kernel reads at most 2 GiB a call."""
_PR_SET_PTRACER = 0x59616D61
"""Linux's prctl.h."""
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


class ForeignMemory:
    """Access to the memory of other ranks' processes; `pids` by rank."""

    route = "memory"

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = pids

    def lend(self, pieces: Tensor, rows: Sequence[int]) -> int:
        return pieces.data_ptr()

    def take_back(self, number: int, size_bytes: int) -> None:
        pass

    def read(self, peer: int, number: int, into: Tensor) -> None:
        try:
            _read(self._pids[peer], number, into.data_ptr(), into.numel() * into.element_size())
        except OSError as error:
            raise RuntimeError(
                f"rank {peer} (process {self._pids[peer]}) cannot be read: {error.strerror}; {_meaning(error)}"
            ) from error

    def look_at(self, peer: int, number: int, scratch: Tensor) -> Tensor:
        self.read(peer, number, scratch)
        return scratch

    def trim(self) -> None:
        pass


def _meaning(error: OSError) -> str:
    """Why a read fails that was allowed when the ranks met, and what helps."""
    if error.errno in (errno.ESRCH, errno.EFAULT):
        return "it has ended, or dropped its model: look for its error, which came first"
    return (
        "it was allowed when the ranks met and no longer is: since then a policy of the kernel changed (Yama's "
        "ptrace_scope, seccomp), or a rank changed its user or made itself undumpable; start the ranks with "
        f"{SWITCH}=0 to send through sockets, or {SWITCH}=shared for shared memory, which need no such right"
    )


class Token:
    """A random number in this process's memory, by which others see that they read the right process."""

    def __init__(self) -> None:
        self.value = secrets.randbits(62)
        self._cell = ctypes.c_int64(self.value)
        self.address = ctypes.addressof(self._cell)


def can_read(pid: int, address: int, value: int) -> bool:
    """Whether process `pid` lets this one read, and has `value` at `address`: else it is another one's number."""
    actual = ctypes.c_int64()
    try:
        _read(pid, address, ctypes.addressof(actual), 8)
    except OSError:
        return False
    return actual.value == value


def let_siblings_in(parents: Sequence[int]) -> bool:
    """Under Yama's scope 1, let this process be read by those that its parent started, if it is everyone's parent.

    Returns whether that was needed and possible. It holds until the process ends, or names another one.
    """
    launcher = os.getppid()
    if launcher <= 1 or set(parents) != {launcher}:
        return False
    try:
        scope = _YAMA.read_text().strip()
    except OSError:
        return False
    # Never for all processes: that would be PR_SET_PTRACER_ANY.
    return scope == "1" and ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(launcher), 0, 0, 0) == 0


def _read(pid: int, address: int, into: int, size: int) -> None:
    call = _libc().process_vm_readv
    done = 0
    while done < size:
        length = min(size - done, _MOST_BYTES)
        here, there = _Range(into + done, length), _Range(address + done, length)
        copied = call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if copied <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        done += copied


class _Range(ctypes.Structure):
    """The kernel's iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_LIBC: ctypes.CDLL | None = None


def _libc() -> ctypes.CDLL:
    global _LIBC
    if _LIBC is None:
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "process_vm_readv"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        call = library.process_vm_readv
        call.restype = ctypes.c_ssize_t
        pointer, number = ctypes.POINTER(_Range), ctypes.c_ulong
        call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
        _LIBC = library
    return _LIBC
