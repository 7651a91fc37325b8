"""`zerokit` inside this process, for benches that only serve a test and log to MLflow.

MLflow takes three seconds of processor time to import, which the tests' process does once. Ranks are forks of the
tests' server.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from tests.cli.commands import environment
from tests.support.distributed import server_context
from tests.support.forked import ForkedRank
from zerokit.cli import main
from zerokit.launch import agents, ranks

FOLLOW_SECONDS = 120.0
"""Ranks that lose a peer end by themselves; until then the launch has not ended."""


def zerokit_inside(
    folder: Path, *arguments: str, meanwhile: Callable[[int], None] = lambda rank: None, **more: str
) -> subprocess.CompletedProcess[str]:
    """As `zerokit`, in this process; MLflow's store is not to be named by a relative path.

    Args:
        folder: the working directory.
        arguments: the command line.
        meanwhile: called again and again while there are ranks, with the process id of one.
        more: of the environment.
    """

    class Rank(ForkedRank):
        def poll(self) -> int | None:
            meanwhile(self.pid)
            return super().poll()

    server_context()  # its socket is in the folder for temporary files of all tests
    said, errors = io.StringIO(), io.StringIO()
    code: int | str | None = 0
    modules = frozenset(sys.modules)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(mock.patch.dict(os.environ, environment(folder, **more), clear=True))
        for name, value in (("argv", ["zerokit", *arguments]), ("path", list(sys.path))):
            stack.enter_context(mock.patch.object(sys, name, value))
        stack.enter_context(mock.patch.object(tempfile, "tempdir", None))
        stack.enter_context(mock.patch.object(ranks, "start_rank", Rank))
        stack.enter_context(mock.patch.object(agents, "PEERS_FOLLOW_SECONDS", FOLLOW_SECONDS))
        stack.enter_context(mock.patch("zerokit.terminal.bars._LINE_SECONDS", math.inf))
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


class Strike:
    """For `meanwhile`: does something as soon as a condition holds, once."""

    def __init__(self, condition: Callable[[], bool], action: Callable[[int], object]) -> None:
        self._condition, self._action = condition, action
        self.done = False

    def __call__(self, rank: int) -> None:
        if not self.done and self._condition():
            self.done = True
            self._action(rank)
