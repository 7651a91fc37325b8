"""Workers of data loaders, pools and others, and the ranks that need them, when all of them are signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import zerokit
from tests.support.distributed import ROOT
from tests.support.signalled import KINDS

MOST = ["loader, fork", "loader, persistent"]


def _start(program: str, *arguments: object, of: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    words = [sys.executable, *of, str(ROOT / "tests" / "support" / program), *map(str, arguments)]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=variables, text=True, start_new_session=True, stdout=pipe, stderr=pipe)


@pytest.mark.parametrize(
    ("number", "kinds"), [(signal.SIGTERM, list(KINDS)), (signal.SIGUSR1, MOST), (signal.SIGINT, MOST)]
)
def test_workers_outlive_a_signal_to_the_process_group(number: signal.Signals, kinds: list[str]) -> None:
    said, errors = _start("signalled.py", number.name, *kinds).communicate()
    expected = [
        f"{kind}, {when}: {number.name} on rank 0, {number:d}"
        for kind in kinds
        for when in ("before", "inside")
    ]
    assert said.splitlines() == ["alone: -15", "alone: -10", "other: -15", "early: 1 -15", *expected], errors


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")

STARTS: list[tuple[tuple[str, ...], signal.Signals, str]] = [
    (TORCHRUN, signal.SIGTERM, "launcher"),
    (TORCHRUN, signal.SIGUSR1, "others"),
    ((), signal.SIGTERM, "all"),
]
"""What starts the ranks, the signal, and who gets it: Slurm signals all processes that it knows."""


@pytest.mark.parametrize(("launcher", "number", "whom"), STARTS)
def test_the_emergency_save_is_made_whoever_is_signalled(
    tmp_path: Path, launcher: tuple[str, ...], number: signal.Signals, whom: str
) -> None:
    run = tmp_path / "run"
    process = _start("stopped.py", run, of=launcher)
    while not Path(f"{run}.ready").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    family = [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
    for pid in {"launcher": [process.pid], "others": family, "all": [process.pid, *family]}[whom]:
        os.kill(pid, number)
    said, errors = process.communicate()  # until all ranks have closed it
    assert said.count(f"ended after {number.name} on rank") == 2, errors
    assert zerokit.verify(run).intact
