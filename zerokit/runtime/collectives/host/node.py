"""Access to the memory of other ranks on the node, instead of sockets. Linux hosts only.

`process_vm_readv` copies a byte once, where loopback copies it twice. The kernel's rules for debuggers apply: the same
user, and no sandbox that forbids the call. Under Yama's `ptrace_scope` 1, Ubuntu's default, ranks name their launcher,
which lets in what it has started.

A few shared pages, the board, say what is where: a rank *offers* memory under its address; a reader marks it as
*taken*, and until all have, it stays as it is. Counts are per operation and unit, so contents cannot be swapped.

[Note: a node] Ranks are of one node if their host's name, its boot, their network namespace and the number of their
node (GROUP_RANK) are the same. So nodes that are simulated on one machine send to each other what nodes would.

[Note: locks show who is alive] Each rank holds a POSIX lock on its byte of the board's file, which the system drops
when the process ends, however that comes, and children do not keep. Asking for it needs no rights.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import hashlib
import mmap
import os
import platform
import secrets
import socket
import struct
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import UsageError
from zerokit.runtime.collectives.route import Kind

SWITCH = "ZEROKIT_CMA"
"""Environment variable: 0 lets the ranks of a node send through sockets, as nodes do."""

_MOST_BYTES = 1 << 30  # the kernel reads at most 2 GiB a call
_PR_SET_PTRACER = 0x59616D61  # Linux's prctl.h
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_CELL_FIELDS = 3
_LOCK = struct.Struct("hhqqi0q")
"""fcntl(2)'s struct flock: type, whence, start, length, process."""


class Neighbours:
    """One rank's access to the others of its node, processes `pids`, by the `board`'s file. See `meet`."""

    def __init__(self, rank: int, pids: Sequence[int], board: int, units: int) -> None:
        self.rank, self._pids, self._board, self._units = rank, pids, board, units
        self.peers = [peer for peer in range(len(pids)) if peer != rank]
        self.cells = memoryview(mmap.mmap(board, _board_size(len(pids), units))).cast("q")
        fcntl.lockf(board, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def read(self, peer: int, address: int, into: Tensor) -> None:
        """Copy rank `peer`'s memory at `address` into contiguous host memory. Raises `RuntimeError` if it is gone."""
        try:
            _read(self._pids[peer], address, into.data_ptr(), into.numel() * into.element_size())
        except OSError as error:
            raise RuntimeError(
                f"rank {peer} (process {self._pids[peer]}) cannot be read: {error.strerror}. It has ended, or dropped "
                f"its model: look for its error, which came first. Otherwise {SWITCH}=0 sends through sockets"
            ) from error

    def require_alive(self) -> None:
        """Raise `RuntimeError` naming all ranks whose processes have ended: one may be the cause."""
        gone = [
            f"rank {peer} (process {self._pids[peer]})" for peer in self.peers if not self._is_alive(peer)
        ]
        if gone:
            raise RuntimeError(f"{' and '.join(gone)} ended, or dropped the model")

    def _is_alive(self, peer: int) -> bool:
        """Whether another rank still has the board; see [Note: locks show who is alive]."""
        query = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, peer, 1, 0)
        held: int = _LOCK.unpack(fcntl.fcntl(self._board, fcntl.F_GETLK, query))[0]
        return held != fcntl.F_UNLCK

    def cell(self, peer: int, kind: Kind, unit: int) -> int:
        """Where the board has a rank's count of offers, the address of the last, and its count of offers taken."""
        return ((peer * len(Kind) + kind) * self._units + unit) * _CELL_FIELDS


@dataclass(frozen=True)
class _Card:
    """What each rank sends to all others at the start; numbers below 2⁶³."""

    willing: int
    node: int
    pid: int
    parent: int
    address: int
    token: int
    board: int


def meet(group: dist.ProcessGroup, units: int) -> Neighbours | None:
    """Access to the other ranks of the gloo group `group`; None on all ranks unless all can read each other."""
    rank, size = group.rank(), group.size()
    if size < 2:
        return None
    token = ctypes.c_int64(secrets.randbits(62))  # by which others see that they read the right process
    willing, board, found = _is_willing(), -1, None
    with ExitStack() as undo:
        if willing and rank == 0:
            try:
                board = os.memfd_create("zerokit-board", os.MFD_CLOEXEC)
                undo.callback(os.close, board)
                os.truncate(board, _board_size(size, units))
            except OSError:
                willing = False
        card = _Card(
            willing, node_number(), os.getpid(), os.getppid(), ctypes.addressof(token), token.value, board
        )
        table = torch.zeros(size, len(fields(_Card)), dtype=torch.int64)
        table[rank] = torch.tensor(astuple(card))
        dist.all_reduce(table, group=group)
        cards = [_Card(*row) for row in table.tolist()]
        if not all(other.willing and other.node == card.node for other in cards):
            return None
        _let_siblings_in([other.parent for other in cards])  # before any of them tries to read
        dist.barrier(group)
        if all(_can_read(other) for other in cards):
            # Another size of board: the models differ, which a later check reports.
            with suppress(OSError, ValueError):
                if rank:
                    board = os.open(f"/proc/{cards[0].pid}/fd/{cards[0].board}", os.O_RDWR | os.O_CLOEXEC)
                    undo.callback(os.close, board)
                found = Neighbours(rank, [other.pid for other in cards], board, units)
        agreed = torch.tensor([found is not None])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
        if not agreed.item():
            return None
        weakref.finalize(found, undo.pop_all().close)
        return found


def node_number() -> int:
    """An identity that all ranks of this node share; see [Note: a node]."""
    parts = [socket.gethostname(), os.environ.get("GROUP_RANK", "")]
    if sys.platform == "linux":
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:8], "little") >> 2


def _is_willing() -> bool:
    """What this rank's environment allows."""
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1", ""):
        raise UsageError(
            f"{SWITCH}={value!r}: 0 stands for sockets, 1 for reading each other's memory where it works"
        )
    # The board relies on x86's order of stores.
    return value != "0" and sys.platform == "linux" and platform.machine() == "x86_64"


def _can_read(card: _Card) -> bool:
    """Whether that process lets this one read, and has its token: else it is another one's number."""
    actual = ctypes.c_int64()
    try:
        _read(card.pid, card.address, ctypes.addressof(actual), 8)
    except OSError:
        return False
    return actual.value == card.token


def _let_siblings_in(parents: Sequence[int]) -> None:
    """Under Yama's scope 1, let this process be read by those that its parent started, if it is everyone's parent."""
    launcher = os.getppid()
    if launcher <= 1 or set(parents) != {launcher} or not _YAMA.exists() or _YAMA.read_text().strip() != "1":
        return
    # Never for all processes: that would be PR_SET_PTRACER_ANY.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(launcher), 0, 0, 0)


def _board_size(ranks: int, units: int) -> int:
    return max(ranks * len(Kind) * units * _CELL_FIELDS, 1) * 8


class _Range(ctypes.Structure):
    """The kernel's iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _read(pid: int, address: int, into: int, size: int) -> None:
    call = _process_vm_readv()
    done = 0
    while done < size:
        length = min(size - done, _MOST_BYTES)
        here, there = _Range(into + done, length), _Range(address + done, length)
        copied = call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if copied <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        done += copied


@functools.cache
def _process_vm_readv() -> Callable[..., int]:
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "process_vm_readv"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    call = library.process_vm_readv
    call.restype = ctypes.c_ssize_t
    pointer, number = ctypes.POINTER(_Range), ctypes.c_ulong
    call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
    return call
