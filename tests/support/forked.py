"""`zerokit bench` in processes that are forked from the tests' server: the command and its ranks.

A process that imports torch costs 1.5 to 3 s of processor time, and each rank of a bench is one. A bench that only
serves a test, as what another is compared with, is run here instead: everything is as in `zerokit.launch.local` except
how a rank is started, which real processes test in tests/launch and tests/cli.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from tests.support.distributed import server_context
from zerokit.launch import local, ranks


def run_forked(
    folder: Path, arguments: Sequence[str], variables: Mapping[str, str], *, seconds: float = 800.0
) -> subprocess.CompletedProcess[str]:
    """`zerokit` with these arguments in `folder`, to its end; its ranks are forks of it.

    Args:
        folder: the working directory.
        arguments: the command line.
        variables: the whole environment.
        seconds: after which it is killed, and `TimeoutError` raised.
    """
    with tempfile.TemporaryDirectory(prefix="zerokit-forked-") as outputs:
        process = server_context().Process(
            target=_command, args=(str(folder), list(arguments), dict(variables), outputs)
        )
        process.start()
        try:
            process.join(seconds)
            if process.exitcode is None:
                raise TimeoutError(f"zerokit {' '.join(arguments)}: not at its end after {seconds:g} s")
        finally:
            process.kill()
            process.join()
        said, errors = (Path(outputs, name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(list(arguments), process.exitcode, said, errors)


class ForkedProcess:
    """A function in a process that is forked from the tests' server, as a `Popen` whose stderr is a pipe.

    Args:
        outputs: an existing folder of its own, for what it prints.
        variables: the whole environment.
        function: at module level; what it raises is its end, as in any program.
    """

    def __init__(
        self, outputs: Path, variables: Mapping[str, str], function: Callable[..., None], *args: Any
    ) -> None:
        self._stderr = outputs / "stderr"
        self._process = server_context().Process(
            target=_program, args=(str(outputs), dict(variables), function, args)
        )
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As a `Popen`'s."""
        return self._process.exitcode  # type: ignore[no-any-return]

    def send_signal(self, number: int) -> None:
        """As a `Popen`'s."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """As a `Popen`'s."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Nothing, and its stderr, once it has ended; `TimeoutError` if it has not by then."""
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutError(f"process {self.pid} has not ended after {timeout:g} s")
        return "", self._stderr.read_text()


def _program(
    outputs: str, variables: dict[str, str], function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    gc.freeze()
    _move_into(os.getcwd(), variables, Path(outputs))
    function(*args)


def _command(folder: str, arguments: list[str], variables: dict[str, str], outputs: str) -> None:
    """The body of the command's process."""
    gc.freeze()  # as ranks do, see `distributed`
    _move_into(folder, variables, Path(outputs))
    from zerokit.cli import main

    ranks.start_rank = fork_rank  # type: ignore[assignment]
    sys.argv = ["zerokit", *arguments]
    main()


def _move_into(folder: str, variables: Mapping[str, str], outputs: Path, suffix: str = "") -> None:
    """Make this fork what a fresh `python -m` in that folder would be."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # TMPDIR is read again
    for number, name in ((1, "stdout"), (2, "stderr")):
        log = os.open(outputs / f"{name}{suffix}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, number)
        os.close(log)
        setattr(
            sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", write_through=True)
        )


def launch_forks(module: str, arguments: Sequence[str], **more: Any) -> None:
    """`zerokit.launch.local.launch` with forks of this process, which must have one thread: a fork itself, say."""
    with mock.patch.object(ranks, "start_rank", fork_rank):
        local.launch(module, arguments, **more)


class fork_rank:
    """As `zerokit.launch.ranks.start_rank`, by a fork: as a `Popen`."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], folder: Path) -> None:
        assert threading.active_count() == 1, "a fork would lack threads: leave MLflow out with --no-mlflow"
        self._code: int | None = None
        here, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            _be_rank(here, command, {**variables, "ZEROKIT_ERROR_FILE": str(folder / "error.json")}, folder)

    def poll(self) -> int | None:
        """As a `Popen`'s."""
        return self.wait(os.WNOHANG)

    def wait(self, options: int = 0) -> int | None:
        """As a `Popen`'s."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, number: int) -> None:
        """As a `Popen`'s."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """As a `Popen`'s."""
        self.send_signal(signal.SIGKILL)


def _be_rank(parent: int, command: Sequence[str], variables: dict[str, str], outputs: Path) -> NoReturn:
    """The body of a rank, which leaves by itself."""
    try:
        _move_into(os.getcwd(), variables, outputs, ".log")
        import torch

        from zerokit.launch.processes import die_with_parent
        from zerokit.launch.rank import main

        die_with_parent(parent)
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))  # torch has read the variable long ago
        main(command[0], list(command[1:]))
    finally:
        os._exit(1)
