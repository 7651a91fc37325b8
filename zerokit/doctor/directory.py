"""The directory that ranks write to: whether it exists, is writable, large and fast enough, and shared."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zerokit.bench.machine.disk import DiskRates, measure_disk
from zerokit.doctor.findings import Verdict, fault, ok, warning
from zerokit.files import nearest

_MIB = 2**20
PREFIX = ".zerokit-doctor-"
"""The names of files that are written and removed again begin so."""

TRIAL_BYTES = 8 * _MIB
TINY_BYTES = 4096
FREE_LEAST_BYTES = 64 * _MIB
FREE_LITTLE_BYTES = 2**30
SLOW_BYTES_PER_S = 20e6
"""A disk of the last century, or one that takes 0.4 s to sync; a checkpoint of 10 GB takes ten minutes."""
SLOW_STATES_BYTES_PER_S = 150e6
"""A hard disk, or a network's; NVMe drives are ten times as fast."""
PER_BILLION_BYTES = 12e9
"""The masters and states of 10⁹ parameters with Adam in mixed precision, which come and leave in every step."""
SEEN_SECONDS = 5.0
"""NFS clients may believe for some seconds that a new file is not there (acdirmin is 30 s only for old directories)."""


@dataclass(frozen=True, slots=True)
class Directory:
    """The directory as one rank sees it."""

    path: str  # as given
    existing: str  # the part of it that exists: the ranks would make the rest
    error: str | None  # why nothing can be written there; None where something was
    free_bytes: int  # for this user
    free_files: int | None  # inodes; None where the file system does not count them
    bytes_per_s: float | None = None  # of writing and syncing a few MiB; None where that was not tried
    rates: DiskRates | None = None  # of large pieces; None where that was not tried, or little is free


def look_at_directory(path: Path, trial_bytes: int) -> Directory:
    """Write a file, sync it, and remove it, in what exists of `path`; a larger one of `trial_bytes` is timed.

    So is a much larger one where states could live, unless there are no `trial_bytes`.
    """
    path = path.absolute()
    existing = nearest(path)
    error: str | None = None
    bytes_per_s, rates = None, None
    free_bytes, free_files = 0, None
    try:
        status = os.statvfs(existing)
        free_bytes = status.f_bavail * status.f_frsize
        free_files = status.f_favail if status.f_files else None
        _write(existing, TINY_BYTES)
        if 0 < trial_bytes < free_bytes:
            bytes_per_s = trial_bytes / max(_write(existing, trial_bytes), 1e-9)
            rates = measure_disk(existing, free_bytes)
    except OSError as trouble:
        error = trouble.strerror or str(trouble)
    return Directory(str(path), str(existing), error, free_bytes, free_files, bytes_per_s, rates)


def _write(folder: Path, size_bytes: int) -> float:
    """Seconds that writing and syncing a new file takes."""
    content = os.urandom(size_bytes)  # a file system that compresses must not look fast
    started = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=PREFIX) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - started


def seen_by_all(
    folder: Path, token: str, rank: int, gather: Callable[[bool], list[bool]]
) -> list[bool] | None:
    """Whether each rank sees in its `folder` the file that rank 0 leaves there; None if rank 0 could not leave any.

    All ranks call it; `gather` returns the values of all ranks.
    """
    file, written = folder / f"{PREFIX}{token}", False
    if rank == 0:
        with contextlib.suppress(OSError):
            file.write_text(token)
            written = True
    shown = gather(written)[0]
    seen = gather(shown and _appears(file, token))  # all have looked when it returns
    if rank == 0:
        with contextlib.suppress(OSError):
            file.unlink()
    return seen if shown else None


def _appears(file: Path, token: str) -> bool:
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        with contextlib.suppress(OSError):
            os.listdir(file.parent)  # asks the server of a network file system again
            if file.read_text() == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def judge_writable(directory: Directory) -> Verdict:
    """ZD601."""
    new = directory.existing != directory.path
    listed = f"{directory.path}{f' (to be made in {directory.existing})' if new else ''}"
    if directory.error is None:
        return ok(listed)
    return fault(
        f"{directory.existing}: {directory.error}",
        "Ranks cannot write checkpoints there.",
        "choose another directory, or give this user write access (ls -ld, id, mount)",
    )


def judge_space(directory: Directory) -> Verdict | None:
    """ZD602; a full disk is mostly why nothing can be written, and space is no matter where anything else is."""
    full = directory.free_bytes < FREE_LEAST_BYTES or directory.free_files == 0
    if directory.error is not None and not full:
        return None
    listed = f"{directory.free_bytes / 2**30:.1f} GiB free in {directory.existing}"
    if directory.free_files == 0:
        return fault(
            "no inode is left", "New files cannot be created, although there is space.", "remove files there"
        )
    if directory.free_bytes < FREE_LEAST_BYTES:
        return fault(
            f"{directory.free_bytes / _MIB:.1f} MiB free in {directory.existing}",
            "No checkpoint fits, and perhaps not even a bench's record.",
            "free space there, or choose another directory",
        )
    if directory.free_bytes < FREE_LITTLE_BYTES:
        return warning(
            listed,
            "Few checkpoints fit: one takes 12 bytes per parameter with Adam.",
            "free space, or keep fewer steps",
        )
    return ok(listed)


def judge_speed(directory: Directory) -> Verdict | None:
    """ZD603."""
    if directory.error is not None or (bytes_per_s := directory.bytes_per_s) is None:
        return None
    listed = f"{bytes_per_s / 1e6:,.0f} MB/s with sync"
    if bytes_per_s >= SLOW_BYTES_PER_S:
        return ok(listed)
    return warning(
        listed,
        "Training waits for saves (blocking=False hides a part), and a save may take minutes.",
        "use a local disk or a parallel file system, and check what else writes there (iostat)",
    )


def judge_rates(directory: Directory) -> Verdict | None:
    """ZD605."""
    if directory.error is not None or (rates := directory.rates) is None:
        return None
    how = "past the page cache" if rates.direct else "through the page cache"
    written, read = (f"{rate / 1e6:,.0f} MB/s" for rate in (rates.write_bytes_per_s, rates.read_bytes_per_s))
    seconds = rates.visit_seconds(PER_BILLION_BYTES)
    listed = f"{written} written, {read} read {how}: {seconds:,.1f} s a step per 10⁹ parameters"
    if min(rates.write_bytes_per_s, rates.read_bytes_per_s) >= SLOW_STATES_BYTES_PER_S:
        return ok(listed)
    return warning(
        listed,
        "Steps with states=PATH there take minutes; checkpoints are not concerned.",
        "give states= a directory on a local NVMe drive",
    )


def judge_seen(saw: bool, path: str) -> Verdict:
    """ZD604."""
    if saw:
        return ok(f"a file of rank 0 was read by all in {path}")
    return fault(
        f"a file that rank 0 wrote to {path} is not there",
        "The ranks' files would be on different disks, so no save would be committed.",
        "mount one file system at the same path on all nodes, or choose a directory on a shared one",
    )
