"""A part in a process of its own, with a deadline, that ends with everything it has started.

The program, which never touches CUDA, asks the tests' server for a guard, and the guard forks the part:

    program ── server ── guard ── part ── what the part starts
    no torch   torch     waits    CUDA    in the part's process group

At the deadline, once the part has ended, and when the program ends in any way, the guard kills the part's process
group. It runs nothing itself, so that no call that hangs can keep it from that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from tests.support.distributed import server_context
from zerokit.launch.processes import die_with_parent

_LOOK_S = 0.02
_GOES_S = 10.0
"""For the driver to let go of a process that was killed."""
_LOG_BYTES = 768 << 10
_DATA_BYTES = 512 << 10
"""The most of each part: with some twenty parts and reruns, files stay far below 16 MiB."""


@dataclass(frozen=True)
class Outcome:
    """What became of a part, a line of `results.jsonl`; `data` is None where the part returned nothing."""

    part: str
    ok: bool
    seconds: float
    error: str
    data: dict[str, Any] | None


@dataclass(frozen=True)
class Job:
    """A part's call: `function` as "module:name", `device` as torch calls it, a `folder` of its own."""

    part: str
    function: str
    device: str
    folder: str
    limit_s: float


def run_job(job: Job, log: Callable[[bytes], None]) -> Outcome:
    """Runs the part to its end, which is the deadline at the latest; `log` is given what it prints, as it prints."""
    context = server_context()
    started = time.monotonic()
    ours, theirs = context.Pipe(duplex=False)
    guard = context.Process(target=_guard, args=(job, theirs), name=job.part)
    guard.start()
    theirs.close()
    room = _LOG_BYTES
    os.set_blocking(ours.fileno(), False)
    while True:
        ended = guard.sentinel in wait([ours, guard.sentinel])
        with contextlib.suppress(BlockingIOError):
            while text := os.read(ours.fileno(), 1 << 16):
                log(text[:room])
                room = max(0, room - len(text))
        if ended:
            break
    ours.close()
    guard.join()
    return _outcome(job, time.monotonic() - started)


def _outcome(job: Job, seconds: float) -> Outcome:
    path = Path(job.folder, "outcome.json")
    if not path.exists():
        return Outcome(job.part, False, seconds, "its guard was killed", None)
    if path.stat().st_size > _DATA_BYTES:
        error = f"returned {path.stat().st_size} bytes, more than {_DATA_BYTES}"
        return Outcome(job.part, False, seconds, error, None)
    return Outcome(**{**json.loads(path.read_text()), "seconds": round(seconds, 2)})


def _guard(job: Job, output: Connection) -> None:
    """Lets the part run, and waits for its end, its deadline and the program's end."""
    os.setpgid(0, 0)  # who kills the program's group leaves this process to kill the part's
    for ignored in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    started = time.monotonic()
    program = multiprocessing.parent_process()
    assert program is not None
    guard = os.getpid()
    if (part := os.fork()) == 0:
        os.setpgid(0, 0)
        die_with_parent(guard)
        _run(job, started)
    with contextlib.suppress(OSError):
        os.setpgid(part, part)  # whoever of both comes first
    error, over = None, False
    while True:
        ended, status = os.waitpid(part, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            error = f"ended with {code}" if code >= 0 else f"was killed: {signal.Signals(-code).name}"
            break
        if time.monotonic() - started > job.limit_s:
            error = f"was not over after {job.limit_s:.0f} s"
            break
        if over := not program.is_alive():
            break
        time.sleep(_LOOK_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(part, signal.SIGKILL)
    while not ended and time.monotonic() - started < job.limit_s + _GOES_S:  # the next part needs its memory
        ended, _ = os.waitpid(part, os.WNOHANG)
        time.sleep(_LOOK_S)
    if over:
        shutil.rmtree(job.folder, ignore_errors=True)
    elif error is not None and not Path(job.folder, "outcome.json").exists():
        _write(job, Outcome(job.part, False, 0.0, error, None))


def _run(job: Job, started: float) -> NoReturn:
    """The part's process."""
    gc.freeze()  # as ranks do, see `distributed`
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)
    print(f"--- {job.part}")
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, job.limit_s - 0.5), exit=False)
    error, data = "", None
    try:
        data = _call(job, started)
    except BaseException as raised:
        from benchmarks.gpu_check.place import CheckFailed

        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
        data = raised.data if isinstance(raised, CheckFailed) else None
    try:
        _write(job, Outcome(job.part, not error, 0.0, error, data))
    except BaseException as raised:  # no JSON, say
        traceback.print_exc()
        _write(job, Outcome(job.part, False, 0.0, f"{type(raised).__name__}: {raised}", None))
    finally:
        sys.stdout.flush()
        # Without the destructors of process groups and contexts, which may wait for others.
        os._exit(0)


def _call(job: Job, started: float) -> dict[str, Any]:
    import torch

    from benchmarks.gpu_check.place import Place

    traces = Path(job.folder, "traces")
    traces.mkdir()
    os.chdir(job.folder)
    tempfile.tempdir = job.folder
    module, name = job.function.split(":")
    part = getattr(importlib.import_module(module), name)
    on_gpu = job.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if not on_gpu:
        torch.set_num_threads(1)  # as ranks do in tests: a host has other work
    data: dict[str, Any] = part(Place(device, not on_gpu, traces, job.limit_s, started))
    return data


def _write(job: Job, outcome: Outcome) -> None:
    text = json.dumps(asdict(outcome))
    part = Path(job.folder, "outcome.part")
    part.write_text(text)
    part.replace(Path(job.folder, "outcome.json"))
