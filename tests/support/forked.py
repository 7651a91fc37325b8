"""`zerokit bench` in processes that are forked from the tests' server: the command, its agents and their ranks.

A process that imports torch costs 1.5 to 3 s of processor time, and the ranks of a bench and torchrun's agents each
are one. A bench that only serves a test, as what another is compared with, is run here instead: everything is as in
`zerokit.launch.local`, but agents and ranks are forks. Real processes are tested in tests/launch and tests/cli.
"""

from __future__ import annotations

import contextlib
import gc
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.support.distributed import server_context
from zerokit.launch import local, rank
from zerokit.launch.processes import die_with_parent


def run_forked(
    folder: Path, arguments: Sequence[str], variables: Mapping[str, str], *, seconds: float = 800.0
) -> subprocess.CompletedProcess[str]:
    """`zerokit` with these arguments in `folder`, to its end; its agents are forks of it, and its ranks of them.

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
        context: of multiprocessing, that starts it; by default the server.
    """

    def __init__(
        self,
        outputs: Path,
        variables: Mapping[str, str],
        function: Callable[..., None],
        *args: Any,
        context: Any = None,
    ) -> None:
        self._stderr = outputs / "stderr"
        self._process = (context or server_context()).Process(
            target=_program, args=(str(outputs), dict(variables), function, args)
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

    sys.argv = ["zerokit", *arguments]
    with forked_agents(multiprocessing.get_context("fork")):
        main()


def _move_into(folder: str, variables: Mapping[str, str], outputs: Path) -> None:
    """Make this fork what a fresh `python -m` in that folder would be."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # TMPDIR is read again
    for number, name in ((1, "stdout"), (2, "stderr")):
        log = os.open(outputs / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, number)
        os.close(log)
        setattr(
            sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", write_through=True)
        )


@contextlib.contextmanager
def forked_agents(context: Any = None) -> Iterator[None]:
    """Inside, the agents of `zerokit.launch.local.launch` are forks, by multiprocessing's `context` or the server."""
    server = context or server_context()

    def start(command: Sequence[str], *, env: Mapping[str, str], stdout: Any, **_: Any) -> ForkedProcess:
        outputs = Path(stdout.name).parent
        return ForkedProcess(outputs, env, _agent, os.getcwd(), list(command[3:]), context=server)

    stand_in = SimpleNamespace(Popen=start, DEVNULL=None)
    with (
        mock.patch.object(local, "subprocess", stand_in),
        # A rank of a test, say, which multiprocessing allows no children.
        mock.patch.dict(vars(multiprocessing.current_process())["_config"], daemon=False),
    ):
        yield


def _agent(folder: str, words: list[str]) -> None:
    """`python -m zerokit.launch.agent` with these words, in a folder."""
    from zerokit.launch import agent

    os.chdir(folder)
    sys.path.insert(0, folder)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(os.getppid())
    os.environ["ZEROKIT_AGENT_PID"] = str(os.getpid())
    at = words.index("-m")
    forks = ["--run-path", "--start-method", "fork", __file__]
    sys.exit(agent.main(Path(words[0]), [*words[2:at], *forks, *words[at + 2 :]]))


def _rank() -> None:
    """`python -m zerokit.launch.rank`, in a fork of its agent."""
    import torch

    def leave(code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if code:
            os._exit(code)  # else the agent waits for what this function returns

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(int(os.environ["ZEROKIT_AGENT_PID"]))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch has read the variable long ago
    with mock.patch.object(rank, "_leave", leave):
        rank.main(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    _rank()
