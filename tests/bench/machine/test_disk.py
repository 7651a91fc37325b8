"""The rates of a disk: what is measured, on which file, and that nothing of it stays."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zerokit.bench.machine import disk
from zerokit.bench.machine.disk import PIECE_BYTES, DiskRates, measure_disk
from zerokit.doctor.directory import look_at_directory


def test_every_byte_is_written_over_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of so many pieces, each written twice and read once."""
    moved: dict[str, list[int]] = {"pwritev": [], "preadv": []}
    for name, offsets in moved.items():
        own = getattr(os, name)

        def call(fd: int, buffers: Any, offset: int, own: Any = own, offsets: list[int] = offsets) -> int:
            offsets.append(offset)
            done: int = own(fd, buffers, offset)
            return done

        monkeypatch.setattr(os, name, call)
    monkeypatch.setattr(disk, "SECONDS", 1e9)
    rates = measure_disk(tmp_path, 10 * 5 * PIECE_BYTES)
    assert rates is not None
    assert rates.size_bytes == 5 * PIECE_BYTES
    every = [number * PIECE_BYTES for number in range(5)]
    assert moved["pwritev"] == [0, *every, *every]  # the first one finds out how the file can be written
    assert moved["preadv"] == every
    assert rates.write_bytes_per_s > 0 < rates.read_bytes_per_s
    assert list(tmp_path.iterdir()) == []


def test_a_disk_is_never_filled(tmp_path: Path) -> None:
    assert measure_disk(tmp_path, 30 * PIECE_BYTES) is None
    rates = measure_disk(tmp_path, 45 * PIECE_BYTES)
    assert rates is not None
    assert rates.size_bytes <= 4.5 * PIECE_BYTES


def test_the_clock_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SECONDS", 0.0)
    rates = measure_disk(tmp_path, 1 << 40)
    assert rates is not None
    assert rates.size_bytes <= disk.SYNCED_BYTES


@pytest.mark.parametrize("refused", ["fcntl", "pwritev"])
def test_where_the_page_cache_cannot_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Some file systems refuse O_DIRECT when it is set, others when it is used."""
    module: Any = fcntl if refused == "fcntl" else os
    own, calls = getattr(module, refused), list[Any]()

    def refuse(*arguments: Any) -> Any:
        sets = refused == "fcntl" and arguments[1] == fcntl.F_SETFL and arguments[2] & os.O_DIRECT
        if sets or (refused == "pwritev" and not calls):
            calls.append(arguments)
            raise OSError(errno.EINVAL, "Invalid argument")
        return own(*arguments)

    monkeypatch.setattr(module, refused, refuse)
    rates = measure_disk(tmp_path, 40 * PIECE_BYTES)
    assert rates is not None
    assert not rates.direct
    assert calls


def test_a_full_disk_is_an_error_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    found = look_at_directory(tmp_path, 4096)
    assert (found.error, found.rates) == ("No space left on device", None)


def test_without_files_that_have_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.open

    def refuse(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return own(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", refuse)
    assert measure_disk(tmp_path, 40 * PIECE_BYTES) is not None
    assert list(tmp_path.iterdir()) == []


def test_a_killed_measurement_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from zerokit.bench.machine import disk\n"
        "disk.SECONDS = 1e9\n"
        "own = disk._move\n"
        "def move(*arguments, **more):\n"
        "    found = own(*arguments, **more)\n"
        "    print('written', flush=True)\n"
        "    return found\n"
        "disk._move = move\n"
        "while True: disk.measure_disk(Path(sys.argv[1]), 40 * disk.PIECE_BYTES)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    assert list(tmp_path.iterdir()) == []  # even while it is measured
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_coming_and_leaving_take_turns() -> None:
    assert DiskRates(True, 1, 2e9, 4e9).visit_seconds(8e9) == 4.0 + 2.0
