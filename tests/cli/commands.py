"""The program `zerokit` as a process, in a folder and with a temporary folder of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support.forked import ForkedProcess, run_forked

ROOT = Path(__file__).parents[2]
# Small enough that most of the time goes into starting Python.
TINY = (
    *("--model", "gpt-tiny", "--seq-len", "16", "--batch-size", "2"),
    *("--steps", "4", "--warmup", "2", "--no-twin"),
)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """That of this process, without what would change a default."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZEROKIT_", "MLFLOW_"))}
    scratch = folder / "tmp"
    scratch.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "TMPDIR": str(scratch), "COLUMNS": "100"} | more


def zerokit(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return run_python(folder, "-m", "zerokit", *arguments, **more)


def run_python(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python in `folder`, to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(folder, **more),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def zerokit_imports(
    folder: Path, *arguments: str, **more: str
) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run the command to its end; what it printed, and the modules that it imported."""
    code = "import sys; from zerokit.cli import main\ntry: main()\nfinally: print('', *sys.modules)"
    done = run_python(folder, "-c", code, *arguments, **more)
    done.stdout, _, modules = done.stdout.rstrip("\n").rpartition("\n")
    return done, set(modules.split())


def zerokit_forked(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """As `zerokit` for a bench that only serves a test: its ranks are forks, see `tests.support.forked`."""
    return run_forked(folder, arguments, environment(folder, **more))


class Torchrun(ForkedProcess):
    """torchrun with these arguments in `folder`, a fork of the tests' server.

    Its end is the context's, by SIGKILL where it has not ended before.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], **more: str) -> None:
        outputs = Path(tempfile.mkdtemp(dir=folder, prefix="torchrun-"))
        super().__init__(outputs, environment(folder, **more), _torchrun, list(arguments), folder=folder)

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def _torchrun(arguments: list[str]) -> None:
    import torch
    from torch.distributed.run import main

    # For workers that are forks: torch has read the variable long ago.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    main(arguments)


FORKS = ("--run-path", "--start-method", "fork")
"""Options of torchrun by which its workers are forks of it, and run a file: `CLI`, say."""
CLI = str(ROOT / "zerokit" / "__main__.py")


def torchrun(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    with Torchrun(folder, arguments, OMP_NUM_THREADS="1", **more) as process:
        said, errors = process.communicate(800)
    assert process.returncode is not None
    return subprocess.CompletedProcess(list(arguments), process.returncode, said, errors)


class _Started(subprocess.Popen[str]):
    """Ends with a context that fails: a bench of a million steps would keep its cores busy for ever."""

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.terminate()
        super().__exit__(kind, *rest)


def start(folder: Path, arguments: Sequence[str], **more: str) -> subprocess.Popen[str]:
    """Start the command; its own session, as a shell would give it, keeps signals from this process."""
    return _Started(
        [sys.executable, "-m", "zerokit", *arguments],
        cwd=folder,
        env=environment(folder, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_of(folder: Path) -> dict[int, dict[str, str]]:
    """The environment of every live process that was started by a command in `folder`, by process id."""
    environments = {one.pid: one.info["environ"] or {} for one in psutil.process_iter(["environ"])}
    return {pid: seen for pid, seen in environments.items() if seen.get("TMPDIR") == str(folder / "tmp")}


def rank_pid(folder: Path, rank: int) -> int:
    """The process id of a rank: of all that know RANK, only the rank itself is named after the module."""
    return next(pid for pid, seen in processes_of(folder).items() if seen.get("RANK") == str(rank))


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str] | Torchrun, seconds: float = 800.0
) -> None:
    """Until the condition holds; an error if the process ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            said, errors = process.communicate()
            raise AssertionError(f"ended with {process.returncode}: {errors or said}")
        if time.monotonic() > deadline:
            process.send_signal(signal.SIGTERM)
            raise AssertionError(f"waited in vain: {process.communicate()[1]}")
        time.sleep(0.05)


def training(folder: Path) -> bool:
    """Whether a bench in `folder` has made a few steps."""
    return any(
        path.read_bytes().count(b"\n") > 3 for path in (folder / "tmp").glob("zerokit-bench-*/progress")
    )
