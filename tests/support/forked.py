"""`zerokit bench` in processes that are forked from the tests' server: the command and its ranks.

A process that imports torch costs 1.5 to 3 s of processor time, and the ranks of a bench and torchrun's agents each
are one. A bench that only serves a test, as what another is compared with, is run here instead: everything is as in
`zerokit.launch.local` except who starts the ranks, which real processes test in tests/launch and tests/cli.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support.distributed import server_context
from zerokit.launch.failures import Failure, explain_failures
from zerokit.launch.interrupts import Interrupts
from zerokit.launch.network import free_port

FOLLOW_SECONDS = 3.0
"""How long ranks may take to end after one has failed."""


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
    from zerokit.launch import local

    local.launch = launch_forks
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
        log = os.open(outputs / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, number)
        os.close(log)
        setattr(
            sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", write_through=True)
        )


def launch_forks(
    module: str,
    arguments: Sequence[str],
    *,
    nodes: int,
    nproc_per_node: int,
    log_dir: Path,
    interrupts: Interrupts,
    environment: Mapping[str, str] | None = None,
    poll: Callable[[], None] = lambda: None,
    port: Callable[[], int] = free_port,
) -> None:
    """`zerokit.launch.local.launch` with forks of this process, which must have one thread: a fork itself, say."""
    from torch._C._distributed_c10d import TCPStore

    from zerokit.launch.local import threads_per_rank

    assert threading.active_count() == 1, "a fork would lack threads: leave MLflow out with --no-mlflow"
    world, number = nodes * nproc_per_node, port()
    here = os.getpid()
    folders: list[Path] = []
    pids: list[int] = []
    for rank in range(world):
        node, local_rank = divmod(rank, nproc_per_node)
        folders.append(log_dir / f"node-{node}" / str(local_rank))
        folders[-1].mkdir(parents=True)
        variables = {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(threads_per_rank(world)),
            **os.environ,
            "ZEROKIT_NODES_ON_MACHINE": str(nodes),
            **(environment or {}),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(nproc_per_node),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(number),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": str(folders[-1] / "error.json"),
        }
        pid = os.fork()
        if pid == 0:
            _rank(here, module, arguments, variables, folders[-1])
        pids.append(pid)
    # After the forks, as it has a thread. It outlives the ranks, as the agents' does.
    store = TCPStore("127.0.0.1", number, is_master=True, wait_for_workers=False)
    codes: dict[int, int] = {}
    try:
        _await_ranks(pids, codes, interrupts, poll)
    finally:
        for rank in codes.keys() ^ range(world):
            os.kill(pids[rank], 9)
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
        del store
    failed = [rank for rank, code in codes.items() if code]
    if failed:
        raise explain_failures(
            [
                _failure(rank, rank // nproc_per_node, pids[rank], codes[rank], folders[rank])
                for rank in failed
            ],
            log_dir,
        )


def _await_ranks(
    pids: Sequence[int], codes: dict[int, int], interrupts: Interrupts, poll: Callable[[], None]
) -> None:
    """Until all have ended, or one has failed and the others had time to follow; `codes` is filled in by rank."""
    failed_at: float | None = None
    while len(codes) < len(pids):
        interrupts.check()
        poll()
        for rank in codes.keys() ^ range(len(pids)):
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                codes[rank] = os.waitstatus_to_exitcode(status)
        if failed_at is None and any(codes.values()):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > FOLLOW_SECONDS:
            return
        time.sleep(0.02)
    poll()


def _rank(
    parent: int, module: str, arguments: Sequence[str], variables: dict[str, str], outputs: Path
) -> NoReturn:
    """The body of a rank, which leaves by itself."""
    try:
        _move_into(os.getcwd(), variables, outputs)
        import torch

        from zerokit.launch.processes import die_with_parent
        from zerokit.launch.rank import main

        die_with_parent(parent)
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))  # torch has read the variable long ago
        main(module, list(arguments))
    finally:
        os._exit(1)


def _failure(rank: int, node: int, pid: int, code: int, folder: Path) -> Failure:
    """As `zerokit.launch.failures.read_failures` makes one of torchrun's report."""
    message, expected, moment = "", False, time.time()
    with contextlib.suppress(OSError, ValueError):
        said = json.loads((folder / "error.json").read_text())["message"]
        message, expected = said["message"], bool(said["extraInfo"]["expected"])
        moment = float(said["extraInfo"]["time"])
    return Failure(rank, node, pid, code, message, expected, moment, folder / "stderr")
