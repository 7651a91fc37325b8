"""All tests marked `gpu`, in one run of pytest, the most telling files first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from threading import Timer
from typing import Any

from benchmarks.gpu_check.place import Place, found
from benchmarks.measuring import ROOT

FILES = (
    "tests/runtime/test_cuda.py",
    "tests/runtime/test_home_gpu.py",
    "tests/runtime/test_optimizers.py",
    "tests/bench/worker/test_worker.py",
    "tests/bench/machine/test_devices.py",
    "tests/runtime/test_cuda_ranks.py",
    "tests/runtime/test_device_way.py",
)
"""Every file with tests that need a GPU; last those of which other parts try the same."""
_DEADLINE_S = "60"
_SPARE_S = 5.0
_RESULT = re.compile(r"^(\S+)::(\S.*) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
_ON_A_HOST = ("tests/runtime/test_cuda_ranks.py",)


def rest(place: Place) -> dict[str, Any]:
    """How many tests of each file passed, failed and skipped, until all have run or the part's time is over."""
    on_gpu = place.device.type == "cuda"
    files = list(FILES if on_gpu else _ON_A_HOST)
    counts: dict[str, Counter[str]] = {file: Counter() for file in files}
    failed: list[str] = []
    faults: list[str] = []
    left, all_ran = files, False
    while left and place.left_s > _SPARE_S:
        seen, code = _pytest(left, "gpu" if on_gpu else "not gpu", place.left_s - _SPARE_S)
        for file, name, result in seen:
            counts[file][result.lower()] += 1
            failed += [f"{file}::{name}"] if result in ("FAILED", "ERROR") else []
        if code is None:
            break
        all_ran = code in (0, 1)
        if all_ran:
            # Some tests of each file need one device alone.
            faults += [f"no test of {file} passed" for file in left if not counts[file]["passed"]]
            break
        # It crashed: the file's other tests are lost, those of the files behind it are not.
        last = seen[-1][0] if seen else left[0]
        faults.append(f"pytest ended with {code} in or behind {last}")
        left = left[left.index(last) + 1 :]
    faults += [f"{name} failed" for name in failed]
    row = ("" if all_ran else "not all ran: ") + ", ".join(
        f"{file.rpartition('/')[2].removesuffix('.py')} "
        + " ".join(f"{count} {result}" for result, count in several.items())
        for file, several in counts.items()
        if several
    )
    data = {
        "row": row,
        "files": {file: dict(several) for file, several in counts.items()},
        "all_ran": all_ran,
    }
    return found(data, faults)


def _pytest(
    files: Sequence[str], marker: str, seconds: float
) -> tuple[list[tuple[str, str, str]], int | None]:
    """(file, test, result) of each test that ended, and pytest's exit code; None where it was killed for its time."""
    words = ["--all", "-m", marker, "-v", "-rs", "-p", "no:cacheprovider", "--color=no", *files]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env=os.environ | {"ZEROKIT_TEST_DEADLINE": _DEADLINE_S, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    over = Timer(seconds, process.kill)
    over.start()
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        print(line, end="")
        if match := _RESULT.match(line):
            seen.append((match[1], match[2], match[3]))
    code = process.wait()
    killed = not over.is_alive()
    over.cancel()
    return seen, None if killed else code
