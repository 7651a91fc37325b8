"""What the operating system and the interpreter know: an opinion of bytes that is independent of zerokit's."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import socket
import stat
import struct
from collections.abc import Iterable

import torch
from torch import Tensor

_TCP_INFO_BYTES_RECEIVED = 128
"""Offset of `tcpi_bytes_received` in Linux's `struct tcp_info`."""


def bytes_received() -> int:
    """Bytes that have arrived on this process's TCP sockets so far (Linux): what gloo really moved."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if (
                connection.family in (socket.AF_INET, socket.AF_INET6)
                and connection.type == socket.SOCK_STREAM
            ):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                total += struct.unpack_from("<Q", info, _TCP_INFO_BYTES_RECEIVED)[0]
    return total


def may_read(pid: int, address: int, *, numel: int) -> list[float] | None:
    """`numel` fp32 values at `address` of another process; None where the kernel refuses (Linux)."""
    values = (ctypes.c_float * numel)()
    size = ctypes.sizeof(values)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(values), size)
    there = (ctypes.c_size_t * 2)(address, size)
    try:
        call = ctypes.CDLL(None).process_vm_readv
    except AttributeError:
        return None
    call.restype = ctypes.c_ssize_t
    return list(values) if call(pid, here, 1, there, 1, 0) == size else None


def live_storages(ignored: Iterable[int] = ()) -> dict[int, int]:
    """Address and bytes of every storage that a Python tensor refers to, except the addresses in `ignored`."""
    gc.collect()
    known = set(ignored)
    found = {}
    with torch._C.DisableTorchFunctionSubclass():  # whose storages guarded parameters would refuse to show
        for candidate in gc.get_objects():
            if not issubclass(type(candidate), Tensor) or candidate.device.type != "cpu":
                continue
            for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
                if tensor is None or tensor.layout != torch.strided:
                    continue
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in known:
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def resident_bytes(address: int, size: int) -> int:
    """Bytes of the pages from `address` on, a page's start, that hold memory of this process's own (Linux).

    Pages of files count for nothing: they are the system's, and one may stand at many addresses.
    """
    pages = -(-size // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // mmap.PAGESIZE * 8)
        entries = struct.unpack(f"<{pages}Q", file.read(pages * 8))
    own = [entry for entry in entries if entry >> 63 == 1 and not entry >> 61 & 1]
    return len(own) * mmap.PAGESIZE


def held_bytes(ignored: Iterable[int] = ()) -> tuple[int, int]:
    """(bytes behind all live storages, how far whole pages may overstate them).

    Stage 3 keeps a storage and hands back its pages, so where a storage starts a page, its pages are counted.
    """
    held = slack = 0
    for address, size in live_storages(ignored).items():
        paged = address % mmap.PAGESIZE == 0
        held += resident_bytes(address, size) if paged else size
        slack += 2 * mmap.PAGESIZE * paged
    return held, slack
