"""Runs a module-level function on N real gloo ranks, each in a process of its own.

The ranks are forked from a server that has imported torch and zerokit once, so that a rank starts in about
50 ms instead of 3 s. They meet over a `FileStore` in a temporary directory: no ports, so no races for them.
Every rank answers over a pipe with a value or with an exception and its traceback, and then waits until all
ranks have answered: a rank that fails keeps its connections open, so the others meet a silent peer (the hard
case), not a closed socket. Past the deadline each rank prints its stack and ends.

    def work(factor: int) -> int:            # module level: it travels by name
        return factor * dist.get_rank()

    assert run_ranks(3, work, 10) == [0, 10, 20]
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]

#: Imported once in the server; `torch._dynamo` because a process's first optimizer imports it (1.5 s), and its
#: backends because the first compilation does.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch._dynamo.backends.debugging",
    "torch.utils.checkpoint",
    "torch.nn.parallel",
    "pytest",
    "zerokit.runtime",
    "tests.support.oracle",
]
#: Transformers, accelerate and Lightning, which take 5 s.
LIBRARIES = "tests.integrations.libraries"


#: Seconds until ranks count as hung and end with their stacks: below the limit of a test in scripts/test, and far
#: beyond what any test takes, however busy or slow the machine is. A GPU that is lent for minutes needs a shorter one.
DEADLINE = float(os.environ.get("ZEROKIT_TEST_DEADLINE", "800"))
#: For errors that ranks must find without a time-out: it lies beyond the deadline, which kills who waits for it.
#: So no test need look at a clock.
AT_ONCE = {"timeout": 3600.0}


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: a value, or an exception, or neither when the process died or hung."""

    rank: int
    value: Any = None
    #: Names of the exception's classes, the most derived first; empty when the rank returned.
    error_types: tuple[str, ...] = ()
    error: str = ""
    traceback: str = ""
    #: How the process ended when it did not answer: a negative signal number or an exit code.
    exitcode: int | None = None
    #: What the rank printed, and its stack past the deadline.
    log: str = ""

    @property
    def ok(self) -> bool:
        return not self.error_types and self.exitcode is None

    def raised(self, *names: str) -> bool:
        """Whether the rank raised an exception that is, or derives from, a class of one of these names."""
        return any(name in self.error_types for name in names)

    def describe(self) -> str:
        how = "returned"
        if self.exitcode is not None:
            how = f"did not answer, exit code {self.exitcode}"
        elif not self.ok:
            how = f"{self.error_types[0]}\n{self.traceback.rstrip()}"
        printed = f"\n[printed]\n{self.log[-6000:].rstrip()}" if self.log.strip() else ""
        return f"--- rank {self.rank}: {how}{printed}"


class RanksFailed(AssertionError):
    """At least one rank did not return; `outcomes` has all of them."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        failed = [outcome.rank for outcome in outcomes if not outcome.ok]
        report = "\n".join(outcome.describe() for outcome in outcomes if not outcome.ok)
        super().__init__(f"ranks {failed} of {len(outcomes)} failed\n{report}")


@dataclass(frozen=True)
class _Job:
    """Everything a rank needs, sent to it once; without a `timeout` it joins no process group."""

    world: int
    directory: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout: float | None
    deadline: float


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0, **kwargs: Any
) -> list[Any]:
    """Calls `function(*args, **kwargs)` on `world` ranks and returns their values in rank order.

    Args:
        timeout: of the process group, in seconds.

    Raises:
        RanksFailed: a rank raised, died or hung; the message holds its traceback or stack.
    """
    __tracebackhide__ = True
    return _values(_run(world, function, args, kwargs, timeout))


def each(function: Callable[..., Any], cases: Sequence[Any]) -> list[Any]:
    """On a rank: what `function` gives for each case."""
    return [function(case) for case in cases]


def run_each(world: int, function: Callable[..., Any], cases: Sequence[Any], **limits: float) -> list[Any]:
    """As `run_ranks` for each case, in one launch: the values of all ranks, by case."""
    __tracebackhide__ = True
    return [list(found) for found in zip(*run_ranks(world, each, function, cases, **limits), strict=True)]


def run_ranks_expecting_errors(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 5.0, **kwargs: Any
) -> list[Outcome]:
    """Like `run_ranks`, but hands back what became of every rank instead of raising."""
    return _run(world, function, args, kwargs, timeout)


def run_alone(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the function in one fresh process without a process group; it may start one, a fake one say."""
    __tracebackhide__ = True
    return _values(_run(1, function, args, kwargs, None))[0]


def _values(outcomes: list[Outcome]) -> list[Any]:
    __tracebackhide__ = True
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def _run(
    world: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float | None,
) -> list[Outcome]:
    context = server_context()
    with tempfile.TemporaryDirectory(prefix="zerokit-ranks-") as directory:
        job = _Job(world, directory, function, args, kwargs, timeout, DEADLINE)
        processes: list[Any] = []
        pipes: list[Connection] = []
        answers: dict[int, Outcome] = {}
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                pipes.append(ours)
                process = context.Process(
                    target=_rank_main, args=(job, rank, theirs), name=f"rank-{rank}", daemon=True
                )
                process.start()
                processes.append(process)
                theirs.close()
            answers = _answers(pipes)
        finally:
            for rank in answers:
                with contextlib.suppress(OSError):
                    pipes[rank].send_bytes(b"bye")
            for rank, process in enumerate(processes):
                process.join(10.0 if rank in answers else 0.0)
                process.kill()
                process.join()
                pipes[rank].close()
        return [_outcome(job, rank, answers.get(rank), one.exitcode) for rank, one in enumerate(processes)]


def preload(module: str) -> None:
    """Let ranks start with this imported as well, if it can be: a server that runs without it starts anew."""
    if module not in PRELOAD:
        PRELOAD.append(module)
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


def server_context() -> Any:
    """multiprocessing's, whose processes are forked from the server; it is started where there is none."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with mock.patch.dict(os.environ, _server_environment()):
        multiprocessing.forkserver.ensure_running()
    return context


def _server_environment() -> dict[str, str]:
    # The server does not see the parent's sys.path before Python 3.12, and a preload that fails is silent.
    before = os.environ.get("PYTHONPATH")
    changes = {"PYTHONPATH": os.pathsep.join([str(ROOT), *([before] if before else [])])}
    # Asking the CUDA runtime whether there is a GPU would start it in the server: no rank could use it then.
    changes["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if "lo" in {name for _, name in socket.if_nameindex()}:
        changes["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve is no reason to fail
    return changes


def _answers(pipes: Sequence[Connection]) -> dict[int, Outcome]:
    """The outcomes by rank. A rank that dies first has none; at the deadline each rank ends by itself."""
    end = time.monotonic() + DEADLINE + 15.0
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    answers = {}
    while waiting and (ready := wait(list(waiting), timeout=max(0.0, end - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            with contextlib.suppress(EOFError, ConnectionError):  # a process that died has closed its end
                answers[rank] = pickle.loads(pipe.recv_bytes())
    return answers


def _outcome(job: _Job, rank: int, answer: Outcome | None, exitcode: int) -> Outcome:
    path = Path(job.directory, f"log-{rank}")
    log = path.read_text(errors="replace") if path.exists() else ""
    if answer is None:
        return Outcome(rank, exitcode=exitcode, log=log)
    if exitcode and answer.ok:
        log += "\n[the function returned, but the process did not end well afterwards]"
        return Outcome(rank, exitcode=exitcode, log=log)
    return replace(answer, log=log)


def _rank_main(job: _Job, rank: int, pipe: Connection) -> None:
    """The body of one rank's process."""
    # What the server has imported is not this rank's garbage: each full collection would walk over a million objects
    # and, by that, copy the pages they share with the server.
    gc.freeze()
    log = os.open(os.path.join(job.directory, f"log-{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    faulthandler.enable(file=sys.stderr)
    faulthandler.dump_traceback_later(job.deadline, exit=True, file=sys.stderr)
    _remember_probes()
    answer = _answer(job, rank)
    pipe.send_bytes(pickle.dumps(answer))
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    if not answer.ok:
        os._exit(0)  # tearing down a group with broken connections may hang or abort
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _remember_probes() -> None:
    """Lets this rank try each kind of optimizer once, not for every `ZeroOptimizer`: a fourth of its time."""
    from zerokit.runtime import trials

    known: dict[tuple[object, ...], Any] = {}
    trial = trials.probe

    def probe(optimizer_class: Any, options: dict[str, Any], master: Any, group: Any = None) -> Any:
        key = (optimizer_class, repr(sorted(options.items())), master, repr(group))
        if key not in known:
            known[key] = trial(optimizer_class, options, master, group)
        return known[key]

    vars(trials)["probe"] = probe


def _answer(job: _Job, rank: int) -> Outcome:
    import torch

    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # torch 2.6's SequentialLR calls its schedulers in a way that they warn of.
            warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step", UserWarning)
            if job.timeout is not None:
                _join_group(job, rank, timedelta(seconds=job.timeout))
            answer = Outcome(rank, job.function(*job.args, **job.kwargs))
        pickle.dumps(answer)
    except BaseException as error:
        names = tuple(cls.__name__ for cls in type(error).__mro__ if cls is not object)
        return Outcome(rank, error_types=names, error=str(error), traceback=traceback.format_exc())
    return answer


def _join_group(job: _Job, rank: int, timeout: timedelta) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    store = FileStore(os.path.join(job.directory, "store"), job.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=timeout)
