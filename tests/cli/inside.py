"""`zerokit` inside this process, for benches that only serve a test and log to MLflow.

MLflow takes three seconds of processor time to import, which the tests' process does once. It has threads, so ranks are
not forks of this process: another, forked from the tests' server, forks them.

    zerokit_inside ── cli.main() ── Launch ──► the starter ── launch_forks ──► rank 0, rank 1
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

from tests.cli.commands import environment
from tests.support import forked
from tests.support.distributed import server_context
from zerokit.cli import main
from zerokit.launch.failures import Failure, WorkerFailed, explain_failures
from zerokit.launch.interrupts import Interrupted, Interrupts

FOLLOW_SECONDS = 120.0
"""Ranks that lose a peer end by themselves; until then the launch has not ended."""


def zerokit_inside(
    folder: Path, *arguments: str, meanwhile: Callable[[int], None] = lambda starter: None, **more: str
) -> subprocess.CompletedProcess[str]:
    """As `zerokit`, in this process; MLflow's store is not to be named by a relative path.

    Args:
        folder: the working directory.
        arguments: the command line.
        meanwhile: called again and again while there are ranks, with the process id of their parent.
        more: of the environment.
    """
    launch = Launch(meanwhile)
    said, errors = io.StringIO(), io.StringIO()
    code: int | str | None = 0
    modules = frozenset(sys.modules)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(mock.patch.dict(os.environ, environment(folder, **more), clear=True))
        for name, value in (("argv", ["zerokit", *arguments]), ("path", list(sys.path))):
            stack.enter_context(mock.patch.object(sys, name, value))
        stack.enter_context(mock.patch.object(tempfile, "tempdir", None))
        stack.enter_context(mock.patch("zerokit.launch.local.launch", launch))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(errors))
        try:
            main()
        except SystemExit as end:
            code = end.code
        finally:
            for name in sys.modules.keys() - modules:  # a model of one's own is another in the next folder
                if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                    del sys.modules[name]
    assert isinstance(code, int)
    return subprocess.CompletedProcess(list(arguments), code, said.getvalue(), errors.getvalue())


class Launch:
    """`zerokit.launch.local.launch` by a starter; made before TMPDIR changes, as the server's socket is there."""

    def __init__(self, meanwhile: Callable[[int], None] = lambda starter: None) -> None:
        self._context, self._meanwhile = server_context(), meanwhile

    def __call__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        nodes: int,
        nproc_per_node: int,
        log_dir: Path,
        interrupts: Interrupts,
        environment: Mapping[str, str] | None = None,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        ours, theirs = self._context.Pipe()
        with tempfile.TemporaryDirectory() as outputs, contextlib.closing(ours):
            starter = forked.ForkedProcess(
                Path(outputs),
                os.environ | dict(environment or {}),
                _start,
                *(theirs, os.getcwd(), module, list(arguments)),
                {"nodes": nodes, "nproc_per_node": nproc_per_node, "log_dir": log_dir.absolute()},
            )
            theirs.close()
            try:
                while not ours.poll(0.02):
                    interrupts.check()
                    self._meanwhile(starter.pid)
                    poll()
                failures: list[Failure] = ours.recv()
                poll()
            finally:
                ours.close()  # so the starter ends, and with it its ranks
                starter.communicate(800)
            if failures:
                raise explain_failures(failures, log_dir)


def _start(
    pipe: Connection, folder: str, module: str, arguments: list[str], shape: Mapping[str, object]
) -> None:
    """The starter: answers with the failures of its ranks."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    forked.FOLLOW_SECONDS = FOLLOW_SECONDS

    def alone() -> None:
        if pipe.poll():  # nothing is ever sent: the other end is closed
            raise SystemExit(1)

    failures: list[Failure] = []
    with Interrupts() as interrupts:
        try:
            forked.launch_forks(module, arguments, interrupts=interrupts, poll=alone, **shape)  # type: ignore[arg-type]
        except WorkerFailed as error:
            failures = list(error.failures)
        except Interrupted:
            return
    pipe.send(failures)


class Strike:
    """For `meanwhile`: does something as soon as a condition holds, once."""

    def __init__(self, condition: Callable[[], bool], action: Callable[[int], object]) -> None:
        self._condition, self._action = condition, action
        self.done = False

    def __call__(self, starter: int) -> None:
        if not self.done and self._condition():
            self.done = True
            self._action(starter)
