"""`zerokit bench` in processes that are forked from the tests' server: the command and its ranks.

A process that imports torch costs 1.5 to 3 s of processor time, and each rank of a bench is one. A bench that only
serves a test, as what another is compared with, is run here instead: everything is as in `zerokit.launch.local` except
how a rank is started, which real processes test in tests/launch and tests/cli.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.support.distributed import server_context
from zerokit.launch import ranks


def run_forked(
    folder: Path, arguments: Sequence[str], variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """`zerokit` with these arguments in `folder`, to its end; its ranks are forks of it.

    Args:
        folder: the working directory.
        arguments: the command line.
        variables: the whole environment.
    """
    with tempfile.TemporaryDirectory(prefix="zerokit-forked-") as outputs:
        process = ForkedProcess(Path(outputs), variables, _command, list(arguments), folder=folder)
        try:
            said, errors = process.communicate(800)
        finally:
            process.kill()
            process.wait()
        assert process.returncode is not None
        return subprocess.CompletedProcess(list(arguments), process.returncode, said, errors)


class ForkedProcess:
    """A function in a process that is forked from the tests' server, as a `Popen` whose outputs are pipes.

    Args:
        outputs: an existing folder of its own, for what it prints.
        variables: the whole environment.
        function: at module level; what it raises is its end, as in any program.
        folder: the working directory; by default this process's.
    """

    def __init__(
        self,
        outputs: Path,
        variables: Mapping[str, str],
        function: Callable[..., None],
        *args: Any,
        folder: Path | None = None,
    ) -> None:
        self._outputs = outputs.absolute()
        self._process = server_context().Process(
            target=_program,
            args=(str(folder or Path.cwd()), dict(variables), self._outputs, function, args),
        )
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As a `Popen`'s."""
        return self._process.exitcode  # type: ignore[no-any-return]

    def poll(self) -> int | None:
        """As a `Popen`'s."""
        return self.returncode

    def wait(self) -> None:
        """As a `Popen`'s."""
        self._process.join()

    def send_signal(self, number: int) -> None:
        """As a `Popen`'s."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """As a `Popen`'s."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Its stdout and stderr, once it has ended; `TimeoutError` if it has not by then."""
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutError(f"process {self.pid} has not ended after {timeout:g} s")
        said, errors = ((self._outputs / f"{name}.log").read_text() for name in ("stdout", "stderr"))
        return said, errors


def _program(
    folder: str,
    variables: dict[str, str],
    outputs: Path,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # as ranks do, see `distributed`
    _move_into(folder, variables, outputs)
    function(*args)


def share_server() -> None:
    """Lets the server that this process is from also make its processes: it would start another."""
    vars(forkserver)["ensure_running"] = vars(forkserver._forkserver)["ensure_running"] = lambda: None


def _command(arguments: list[str]) -> None:
    from zerokit.cli import main

    ranks.start_rank = ForkedRank  # type: ignore[assignment]
    share_server()
    sys.argv = ["zerokit", *arguments]
    main()


def _move_into(folder: str, variables: Mapping[str, str], outputs: Path) -> None:
    """Make this fork what a fresh `python -m` in that folder would be."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # TMPDIR is read again
    for number, name in ((1, "stdout"), (2, "stderr")):
        log = os.open(outputs / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, number)
        os.close(log)
        setattr(
            sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", write_through=True)
        )


class ForkedRank(ForkedProcess):
    """In the place of `zerokit.launch.ranks.start_rank`."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], folder: Path) -> None:
        variables = {**variables, "ZEROKIT_ERROR_FILE": str((folder / "error.json").absolute())}
        super().__init__(folder, variables, _be_rank, list(command))


def _be_rank(command: list[str]) -> None:
    """The body of a rank, which leaves by itself, or with who has asked for it."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    import torch

    from zerokit.launch.rank import main

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch has read the variable long ago
    main(command[0], command[1:])


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
