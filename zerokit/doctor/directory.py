"""The directory that ranks write to: whether it exists, is writable, large and fast enough, and shared."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from zerokit.doctor.disk import DiskRates, measure_disk
from zerokit.doctor.findings import Answers, Finding, Verdict, by_machine, by_rank, finding

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
    """The directory as one rank sees it.

    Attributes:
        path: as given.
        existing: the part of it that exists: the ranks would make the rest.
        error: why nothing can be written there; None where something was.
        free_bytes: for this user.
        free_files: inodes; None where the file system does not count them.
        bytes_per_s: of writing and syncing a few MiB; None where that was not tried.
        rates: of large pieces; None where that was not tried, or little is free.
    """

    path: str
    existing: str
    error: str | None
    free_bytes: int
    free_files: int | None
    bytes_per_s: float | None = None
    rates: DiskRates | None = None


def look_at_directory(path: Path, trial_bytes: int) -> Directory:
    """Write a file, sync it, and remove it, in what exists of `path`; a larger one of `trial_bytes` is timed.

    So is a much larger one where states could live, unless there are no `trial_bytes`.
    """
    path = path.absolute()
    existing = next(
        one for one in (path, *path.parents) if os.path.exists(one)
    )  # no error where a parent is forbidden
    error: str | None = None
    bytes_per_s, rates = None, None
    free_bytes, free_files = 0, None
    try:
        status = os.statvfs(existing)
        free_bytes = status.f_bavail * status.f_frsize
        free_files = status.f_favail if status.f_files else None
        if not existing.is_dir():
            error = "Not a directory"
        else:
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


def show(folder: Path, token: str) -> bool:
    """Write rank 0's file for the others; returns whether that worked."""
    with contextlib.suppress(OSError):
        (folder / f"{PREFIX}{token}").write_text(token)
        return True
    return False


def sees(folder: Path, token: str, seconds: float = SEEN_SECONDS) -> bool:
    """Whether this rank sees rank 0's file."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            os.listdir(folder)  # asks the server of a network file system again
            if (folder / f"{PREFIX}{token}").read_text() == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def take_away(folder: Path, token: str) -> None:
    """Remove rank 0's file."""
    with contextlib.suppress(OSError):
        (folder / f"{PREFIX}{token}").unlink()


def judge_directories(answers: Answers[Directory], seen: Answers[bool] | None = None) -> list[Finding]:
    """ZD601 to ZD604; `seen` is whether each rank saw the file of rank 0, None where there was no file."""
    findings = by_rank("ZD601", answers, _judge_writable)
    usable = [(seat, directory) for seat, directory in answers if directory.error is None]
    # A full disk is mostly why nothing can be written.
    full = [entry for entry in answers if entry[1].free_bytes < FREE_LEAST_BYTES or entry[1].free_files == 0]
    findings += by_machine("ZD602", usable or full, _judge_space)
    timed = [(seat, one.bytes_per_s) for seat, one in usable if one.bytes_per_s is not None]
    findings += by_machine("ZD603", timed, _judge_speed)
    findings += by_machine("ZD605", [(s, one.rates) for s, one in usable if one.rates], _judge_rates)
    if len(answers) > 1:
        if seen is None:
            findings.append(
                finding("ZD604", Verdict.skipped("rank 0 could not write there, or the ranks did not meet"))
            )
        else:
            findings += by_rank("ZD604", seen, lambda saw: _judge_seen(saw, answers[0][1].path))
    return findings


def _judge_writable(directory: Directory) -> Verdict:
    new = directory.existing != directory.path
    listed = f"{directory.path}{f' (to be made in {directory.existing})' if new else ''}"
    if directory.error is None:
        return Verdict.ok(listed)
    return Verdict.fault(
        f"{directory.existing}: {directory.error}",
        "Ranks cannot write checkpoints there.",
        "choose another directory, or give this user write access (ls -ld, id, mount)",
    )


def _judge_space(directory: Directory) -> Verdict:
    listed = f"{directory.free_bytes / 2**30:.1f} GiB free in {directory.existing}"
    if directory.free_files == 0:
        return Verdict.fault(
            "no inode is left", "New files cannot be created, although there is space.", "remove files there"
        )
    if directory.free_bytes < FREE_LEAST_BYTES:
        return Verdict.fault(
            f"{directory.free_bytes / _MIB:.1f} MiB free in {directory.existing}",
            "No checkpoint fits, and perhaps not even a bench's record.",
            "free space there, or choose another directory",
        )
    if directory.free_bytes < FREE_LITTLE_BYTES:
        return Verdict.warning(
            listed,
            "Few checkpoints fit: one takes 12 bytes per parameter with Adam.",
            "free space, or keep fewer steps",
        )
    return Verdict.ok(listed)


def _judge_speed(bytes_per_s: float) -> Verdict:
    listed = f"{bytes_per_s / 1e6:,.0f} MB/s with sync"
    if bytes_per_s >= SLOW_BYTES_PER_S:
        return Verdict.ok(listed)
    return Verdict.warning(
        listed,
        "Training waits for saves (blocking=False hides a part), and a save may take minutes.",
        "use a local disk or a parallel file system, and check what else writes there (iostat)",
    )


def _judge_rates(rates: DiskRates) -> Verdict:
    how = "past the page cache" if rates.direct else "through the page cache"
    written, read = (f"{rate / 1e6:,.0f} MB/s" for rate in (rates.write_bytes_per_s, rates.read_bytes_per_s))
    seconds = rates.visit_seconds(PER_BILLION_BYTES)
    listed = f"{written} written, {read} read {how}: {seconds:,.1f} s a step per 10⁹ parameters"
    if min(rates.write_bytes_per_s, rates.read_bytes_per_s) >= SLOW_STATES_BYTES_PER_S:
        return Verdict.ok(listed)
    return Verdict.warning(
        listed,
        "Steps with states=PATH there take minutes; checkpoints are not concerned.",
        "give states= a directory on a local NVMe drive",
    )


def _judge_seen(saw: bool, path: str) -> Verdict:
    if saw:
        return Verdict.ok(f"a file of rank 0 was read by all in {path}")
    return Verdict.fault(
        f"a file that rank 0 wrote to {path} is not there",
        "The ranks' files would be on different disks, so no save would be committed.",
        "mount one file system at the same path on all nodes, or choose a directory on a shared one",
    )
