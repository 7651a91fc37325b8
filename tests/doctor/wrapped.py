"""The worker with faults that cannot be made for real on one machine; each rank reads from WRAPPED what to do.

software    rank 1 has another version of NCCL
clock       rank 1's clock is an hour ahead
elsewhere   rank 1 sees another directory under the same name
hang        rank 1 never comes
die         rank 1 is killed when it looks around
unreadable  no rank lets others read its memory

It measures as little as can be: what the figures are is no matter here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

from zerokit.bench.machine import computing, disk, wire
from zerokit.doctor import directory, worker
from zerokit.doctor.devices import Device
from zerokit.doctor.facts import RankFacts, look_around
from zerokit.doctor.findings import Seat
from zerokit.offsets import measure_offsets

_PR_SET_DUMPABLE = 4
_CAPABILITY_VERSION = 0x20080522
_CAP_SYS_PTRACE = 19


def _look(seat: Seat, directory: Path, trial_bytes: int, used: Device | None) -> RankFacts:
    faults = os.environ["WRAPPED"].split() if seat.rank == 1 else []
    if "hang" in faults:
        time.sleep(3600)
    if "die" in faults:
        os.kill(os.getpid(), signal.SIGKILL)
    if "elsewhere" in faults:
        directory = directory / "local"
    facts = look_around(seat, directory, trial_bytes, used)
    if "software" in faults:
        facts = replace(facts, software=replace(facts.software, nccl="2.1"))
    return facts


def _now() -> float:
    ahead = "clock" in os.environ["WRAPPED"] and os.environ["RANK"] == "1"
    return time.time() + 3600.0 * ahead


def _be_unreadable() -> None:
    """Root may read any process: it must lose that right, and the process be marked as not to be read."""
    system = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, of two words each
    assert system.capget(header, sets) == 0
    for which in range(3):
        sets[which] &= ~(1 << _CAP_SYS_PTRACE)
    assert system.capset(header, sets) == 0
    assert system.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0


if __name__ == "__main__":
    if "unreadable" in os.environ["WRAPPED"]:
        _be_unreadable()
    computing._ROUNDS, computing._LONG_ENOUGH_S = 1, 0.001
    computing._EXCHANGES_S, computing._NUMEL = 0.01, 1 << 16
    disk.MOST_BYTES, disk.SECONDS = 4 * disk.PIECE_BYTES, 0.001
    wire.REPETITIONS, wire.FAST_S = 1, 0.0
    directory.SEEN_SECONDS = 0.5
    mock.patch.object(worker, "look_around", _look).start()
    mock.patch.object(worker, "measure_offsets", partial(measure_offsets, now=_now)).start()
    worker.main(Path(sys.argv[1]))
