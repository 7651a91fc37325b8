"""The system's limits on a rank: shared memory, locked memory, open files, access to other ranks' memory."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from zerokit.doctor.findings import Verdict, fault, ok, warning

_MIB = 2**20

SHM_LEAST_BYTES = 16 * _MIB
"""NCCL maps about 10 MB for each pair of ranks of a node (NCCL's documentation, troubleshooting)."""
SHM_SMALL_BYTES = 64 * _MIB
"""Docker's default."""
MEMLOCK_LOW_BYTES = 8 * _MIB
"""The kernel's own default since Linux 5.16; less was set on purpose."""
FILES_BESIDES = 512
"""Files that a rank opens whatever the world size: libraries, data, logs, checkpoint files."""
FILES_A_PEER = 6
"""Connections to each other rank: groups for training, control and checkpoints, with room for a program's own."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one process; None means unlimited."""

    shm_bytes: int  # size of /dev/shm; 0 where there is none
    shm_free_bytes: int  # what is free of it
    memlock_bytes: int | None  # memory that may be locked
    open_files: int | None  # descriptors that may be open
    cma: str  # the environment's ZEROKIT_CMA
    infiniband: bool  # whether there is such a device


def look_at_limits() -> Limits:
    """Read the limits of this process."""
    size, free = 0, 0
    with contextlib.suppress(OSError):
        status = os.statvfs("/dev/shm")
        size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    return Limits(
        shm_bytes=size,
        shm_free_bytes=free,
        memlock_bytes=_soft(resource.RLIMIT_MEMLOCK),
        open_files=_soft(resource.RLIMIT_NOFILE),
        cma=os.environ.get("ZEROKIT_CMA", "1") or "1",
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
    )


def _soft(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def judge_shm(limits: Limits) -> Verdict:
    """ZD401."""
    listed = f"{_mib(limits.shm_free_bytes)} free of {_mib(limits.shm_bytes)}"
    remedy = "mount it larger: mount -o remount,size=8G /dev/shm; for a container --shm-size=8g or --ipc=host"
    if limits.shm_bytes == 0:
        return fault("there is none", "NCCL and data loaders with workers fail.", remedy)
    if limits.shm_free_bytes < SHM_LEAST_BYTES:
        return fault(
            listed,
            "It is full: NCCL fails when it starts, data loaders' workers die with bus errors.",
            f"remove what dead processes left (ls -l /dev/shm), or {remedy}",
        )
    if limits.shm_bytes <= SHM_SMALL_BYTES:
        return warning(
            listed, "Docker's default: NCCL with many ranks, and data loaders, soon fill it.", remedy
        )
    return ok(listed)


def judge_memlock(limits: Limits) -> Verdict:
    """ZD402."""
    if limits.memlock_bytes is None:
        return ok("unlimited")
    listed = f"at most {_mib(limits.memlock_bytes)}"
    remedy = "ulimit -l unlimited; in a container --ulimit memlock=-1; for services LimitMEMLOCK=infinity"
    if limits.infiniband:
        return warning(
            listed, "NCCL cannot register its buffers with the InfiniBand device (ibv_reg_mr fails).", remedy
        )
    if limits.memlock_bytes < MEMLOCK_LOW_BYTES:
        return warning(
            listed,
            f"This is less than the kernel's default of {_mib(MEMLOCK_LOW_BYTES)}: RDMA would fail.",
            remedy,
        )
    return ok(listed)


def judge_files(limits: Limits, world: int) -> Verdict:
    """ZD403."""
    needed = FILES_BESIDES + FILES_A_PEER * world
    if limits.open_files is None or limits.open_files >= needed:
        return ok("unlimited" if limits.open_files is None else f"at most {limits.open_files}")
    return warning(
        f"at most {limits.open_files}",
        f"{world} ranks may need {needed} each: connections then fail with “too many open files”.",
        f"ulimit -n {max(65536, needed)}",
    )


def judge_route(route: str, cma: str) -> Verdict:
    """ZD404: how ranks of a node read each other's tensors, through "memory" or "sockets"; `cma` as in `Limits`."""
    if route == "memory" or cma == "0":
        return ok(f"through {route}" + ("" if cma == "1" else f" (ZEROKIT_CMA={cma})"))
    return warning(
        f"through {route}",
        "The kernel (Yama) or a sandbox forbids reading other processes' memory, and sockets cost more copies. Results "
        "are the same bits.",
        "sysctl kernel.yama.ptrace_scope=1; in a container --cap-add SYS_PTRACE, and a seccomp profile with "
        "process_vm_readv; or ZEROKIT_CMA=0, to confirm that this is intended",
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / _MIB:.1f} MiB"
