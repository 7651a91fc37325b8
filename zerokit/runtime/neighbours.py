"""Ranks of one host that read each other's memory (Linux's cross-memory attach), instead of sending through sockets.

A byte on loopback is copied into the kernel by one rank and out of it by another; `process_vm_readv` copies it once.
What the kernel does not give, the ranks do themselves on a *board*, a few shared pages: a rank *offers* the address
of what others may read, a reader says when it has *taken* it, and until all have, the offered memory stays as it is.
Counts on the board are per operation and unit, so ranks that do things in another order cannot swap contents.

It serves where all ranks see each other's process under its number and may read it: the kernel's rules for debuggers
apply (same user; not under Yama's `ptrace_scope` from 1 on; not every sandbox). `meet` finds out by trying.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import sys
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

SWITCH = "ZEROKIT_CMA"
"""Environment variable: 0 lets the ranks of one host send through sockets, as those of several hosts do."""

_FIELDS = 3
_MOST_BYTES = 1 << 30
"""The kernel reads at most 2 GiB a call."""


class Kind(IntEnum):
    """Operations that others read for; at most one of a kind and unit at a time."""

    GATHER = 0
    REDUCE = 1


class Neighbours:
    """One rank's access to the others. Made by `meet`.

    Args:
        rank: this rank.
        pids: every rank's process.
        board: shared by all ranks; for each rank, kind and unit how often it offered, what address, how often it took.
        units: how many units there are.
        token: this rank's, kept for as long as it takes part; knows where each of the others has its own.
    """

    def __init__(self, rank: int, pids: list[int], board: memoryview, units: int, token: _Token) -> None:
        self.rank = rank
        self.peers = [peer for peer in range(len(pids)) if peer != rank]
        self._pids, self._board, self._units, self._token = pids, board, units, token

    def offer(self, kind: Kind, unit: int, tensor: Tensor) -> int:
        """Let the others read `tensor` until they have `taken` it. Returns which offer of this unit it is."""
        place = self._place(self.rank, kind, unit)
        count = self._board[place] + 1
        self._board[place + 1] = tensor.data_ptr()
        self._board[place] = count  # last: who sees the count sees the address (x86 keeps stores in order)
        return count

    def offered(self, kind: Kind, unit: int, count: int) -> dict[int, int] | None:
        """The other ranks' addresses once all have made this offer."""
        addresses = {}
        for peer in self.peers:
            place = self._place(peer, kind, unit)
            if self._board[place] < count:
                return None
            addresses[peer] = self._board[place + 1]
        return addresses

    def take(self, kind: Kind, unit: int, count: int) -> None:
        """Tell the others that this rank has read all it wants of this offer."""
        self._board[self._place(self.rank, kind, unit) + 2] = count

    def taken(self, kind: Kind, unit: int, count: int) -> bool:
        """Whether all others have read what this rank offered."""
        return all(self._board[self._place(peer, kind, unit) + 2] >= count for peer in self.peers)

    def read(self, peer: int, address: int, into: Tensor) -> None:
        """Copy from `address` of rank `peer` into contiguous host memory. Raises `RuntimeError` if it is gone."""
        _read(self._pids[peer], address, into.data_ptr(), into.numel() * into.element_size(), peer)

    def require_alive(self) -> None:
        """Raise `RuntimeError` naming a rank whose process has ended."""
        found = _Token()
        for peer in self.peers:
            _read(self._pids[peer], self._token.addresses[peer], found.address, 8, peer)

    def _place(self, rank: int, kind: Kind, unit: int) -> int:
        return 1 + ((rank * len(Kind) + kind) * self._units + unit) * _FIELDS


def meet(group: dist.ProcessGroup, units: int) -> Neighbours | None:
    """Every rank's access to the others, or None on all of them; `group` must be gloo's."""
    rank, world = group.rank(), group.size()
    if world < 2:
        return None
    token = _Token(secrets.randbits(62))
    size = (1 + world * len(Kind) * units * _FIELDS) * 8
    able, descriptor = _able(), -1
    if able and rank == 0:
        try:
            descriptor = _new_board(size, token.value)
        except OSError:
            able = False
    try:
        table = torch.zeros(world, 5, dtype=torch.int64)
        table[rank] = torch.tensor([able, os.getpid(), token.address, token.value, descriptor])
        dist.all_reduce(table, group=group)
        rows = [[int(cell) for cell in row] for row in table.tolist()]
        board = _open_board(rows, rank, size)
        agreed = torch.tensor([board is not None])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if board is None or not agreed.item():
        return None
    token.addresses = [row[2] for row in rows]
    return Neighbours(rank, [row[1] for row in rows], board, units, token)


class _Token:
    """A number that a process can be known by, if it can be read there."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._cell = ctypes.c_int64(value)
        self.address = ctypes.addressof(self._cell)
        self.addresses: list[int] = []
        """Every rank's."""

    def current(self) -> int:
        return self._cell.value


def _able() -> bool:
    # The board relies on x86's order of stores.
    return (
        sys.platform == "linux"
        and platform.machine() == "x86_64"
        and hasattr(_libc(), "process_vm_readv")
        and os.environ.get(SWITCH, "1") != "0"
    )


def _new_board(size: int, token: int) -> int:
    descriptor = os.memfd_create("zerokit", os.MFD_CLOEXEC)
    os.truncate(descriptor, size)
    os.pwrite(descriptor, token.to_bytes(8, sys.byteorder), 0)
    return descriptor


def _open_board(rows: list[list[int]], rank: int, size: int) -> memoryview | None:
    """The board that rank 0 made, if this rank reaches it and can read every rank's memory."""
    if not all(able for able, *_ in rows):
        return None
    try:
        for peer, (_, pid, address, value, _) in enumerate(rows):
            found = _Token()
            _read(pid, address, found.address, 8, peer)
            if found.current() != value:
                return None  # another process under the same number, in another container
        owner, descriptor = rows[0][1], rows[0][4]
        with open(f"/proc/{owner}/fd/{descriptor}", "r+b", buffering=0) as file:
            board = memoryview(mmap.mmap(file.fileno(), size)).cast("q")
    except (OSError, RuntimeError, ValueError):
        return None
    return board if board[0] == rows[0][3] else None


def _read(pid: int, address: int, into: int, size: int, peer: int) -> None:
    call = _libc().process_vm_readv
    done = 0
    while done < size:
        length = min(size - done, _MOST_BYTES)
        here, there = _Range(into + done, length), _Range(address + done, length)
        copied = call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if copied <= 0:
            code = ctypes.get_errno()
            raise RuntimeError(
                f"rank {peer} (process {pid}) cannot be read: {os.strerror(code)}; it has ended, or dropped its model"
            )
        done += copied


class _Range(ctypes.Structure):
    """The kernel's iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_LIBC: ctypes.CDLL | None = None


def _libc() -> ctypes.CDLL:
    global _LIBC
    if _LIBC is None:
        library = ctypes.CDLL(None, use_errno=True)
        if hasattr(library, "process_vm_readv"):
            call = library.process_vm_readv
            call.restype = ctypes.c_ssize_t
            pointer, number = ctypes.POINTER(_Range), ctypes.c_ulong
            call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
        _LIBC = library
    return _LIBC
