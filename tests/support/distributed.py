"""Runs a module-level function on N real gloo ranks, each in a process of its own.

The ranks are forked from a server that has imported torch and zerokit once, so that a rank starts in about
50 ms instead of 3 s. They meet over a `FileStore` in a temporary directory: no ports, so no races for them.
Every rank answers over a pipe with a value or with an exception and its traceback, and then waits until all
ranks have answered: a rank that fails keeps its connections open, so the others meet a silent peer (the hard
case), not a closed socket. Past the deadline each rank's stack is collected and the rank is killed.

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
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

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


#: Seconds until ranks count as hung and are killed with their stacks: below the limit of a test in scripts/test, and
#: far beyond what any test takes, however busy or slow the machine is.
DEADLINE = 800.0
#: For errors that ranks must find without a time-out: it lies beyond the deadline, which kills who waits for it.
#: So no test need look at a clock.
AT_ONCE = {"timeout": 3600.0}


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: a value, or an exception, or neither when the process died or was killed."""

    rank: int
    value: Any = None
    #: Names of the exception's classes, the most derived first; empty when the rank returned.
    error_types: tuple[str, ...] = ()
    error: str = ""
    traceback: str = ""
    #: Seconds from the start of the function to its end.
    seconds: float = 0.0
    #: How the process ended when it did not answer: a negative signal number or an exit code.
    exitcode: int | None = None
    #: What the rank printed, and its stack when it had to be killed.
    log: str = ""

    @property
    def ok(self) -> bool:
        return not self.error_types and self.exitcode is None

    def raised(self, *names: str) -> bool:
        """Whether the rank raised an exception that is, or derives from, a class of one of these names."""
        return any(name in self.error_types for name in names)

    def describe(self) -> str:
        lines = [f"--- rank {self.rank}: "]
        if self.ok:
            lines[0] += "returned"
        elif self.exitcode is not None:
            lines[0] += f"did not answer, exit code {self.exitcode}"
        else:
            lines[0] += f"{self.error_types[0]} after {self.seconds:.1f} s"
            lines.append(self.traceback.rstrip())
        if self.log.strip():
            lines.append(f"[printed]\n{self.log[-6000:].rstrip()}")
        return "\n".join(lines)


class RanksFailed(AssertionError):
    """At least one rank did not return; `outcomes` has all of them."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        failed = [outcome.rank for outcome in outcomes if not outcome.ok]
        report = "\n".join(outcome.describe() for outcome in outcomes if not outcome.ok)
        super().__init__(f"ranks {failed} of {len(outcomes)} failed\n{report}")


@dataclass(frozen=True)
class _Job:
    """Everything a rank needs, sent to it once."""

    world: int
    directory: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout_s: float
    deadline_s: float
    process_group: bool


@dataclass
class _Rank:
    """The parent's view of one rank."""

    process: Any
    pipe: Connection
    answer: dict[str, Any] | None = None
    over: bool = False
    extra_log: list[str] = field(default_factory=list)


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 300.0,
    deadline: float = DEADLINE,
    **kwargs: Any,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` on `world` ranks and returns their values in rank order.

    Args:
        timeout: of the process group, in seconds.
        deadline: for everything together, in seconds; then the ranks are killed.

    Raises:
        RanksFailed: a rank raised, died or was killed; the message holds its traceback or stack.
    """
    __tracebackhide__ = True
    outcomes = run_ranks_expecting_errors(
        world, function, *args, timeout=timeout, deadline=deadline, **kwargs
    )
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def each(function: Callable[..., Any], cases: Sequence[Any]) -> list[Any]:
    """On a rank: what `function` gives for each case."""
    return [function(case) for case in cases]


def run_each(world: int, function: Callable[..., Any], cases: Sequence[Any], **limits: float) -> list[Any]:
    """As `run_ranks` for each case, in one launch: the values of all ranks, by case."""
    __tracebackhide__ = True
    return [list(found) for found in zip(*run_ranks(world, each, function, cases, **limits), strict=True)]


def run_ranks_expecting_errors(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 5.0,
    deadline: float = DEADLINE,
    **kwargs: Any,
) -> list[Outcome]:
    """Like `run_ranks`, but hands back what became of every rank instead of raising."""
    return _run(world, function, args, kwargs, timeout, deadline, process_group=True)


def run_alone(function: Callable[..., Any], *args: Any, deadline: float = DEADLINE, **kwargs: Any) -> Any:
    """Calls the function in one fresh process without a process group; it may start one, a fake one say."""
    __tracebackhide__ = True
    outcomes = _run(1, function, args, kwargs, 30.0, deadline, process_group=False)
    if not outcomes[0].ok:
        raise RanksFailed(outcomes)
    return outcomes[0].value


def _run(
    world: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    deadline: float,
    *,
    process_group: bool,
) -> list[Outcome]:
    context = server_context()
    with tempfile.TemporaryDirectory(prefix="zerokit-ranks-") as directory:
        job = _Job(world, directory, function, args, kwargs, timeout, deadline, process_group)
        ranks: list[_Rank] = []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main, args=(job, rank, theirs), name=f"rank-{rank}", daemon=True
                )
                process.start()
                theirs.close()
                ranks.append(_Rank(process, ours))
            _collect(ranks, time.monotonic() + deadline)
            for rank, entry in enumerate(ranks):
                if not entry.over:
                    entry.extra_log.append(_stack_of(entry, rank, directory, deadline))
        finally:
            _end(ranks)
        return [_outcome(entry, rank, directory) for rank, entry in enumerate(ranks)]


def preload(module: str) -> None:
    """Let ranks start with this imported as well, if it can be: a server that runs without it starts anew."""
    if module not in PRELOAD:
        PRELOAD.append(module)
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


def server_context() -> Any:
    """multiprocessing's, whose processes are forked from the server; it is started where there is none."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with _environment(_server_environment()):
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


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(ranks: list[_Rank], end: float) -> None:
    """Waits until every rank has answered or died, or until `end` on the monotonic clock."""
    while open_ranks := {entry.pipe: entry for entry in ranks if not entry.over}:
        left = end - time.monotonic()
        if left <= 0:
            return
        for ready in wait(list(open_ranks), timeout=left):
            assert isinstance(ready, Connection)
            entry = open_ranks[ready]
            entry.over = True
            # A process that died closes its end: poll() is then true and recv raises.
            with contextlib.suppress(EOFError, ConnectionError):
                entry.answer = pickle.loads(ready.recv_bytes())


def _stack_of(entry: _Rank, rank: int, directory: str, deadline: float) -> str:
    path = Path(directory, f"stack-{rank}")
    with contextlib.suppress(ProcessLookupError):
        os.kill(entry.process.pid, signal.SIGUSR1)
    size, until = -1, time.monotonic() + 2.0
    while time.monotonic() < until:  # until the file has stopped growing
        time.sleep(0.1)
        now = path.stat().st_size if path.exists() else 0
        if now and now == size:
            break
        size = now
    stack = path.read_text(errors="replace") if path.exists() else "no stack\n"
    return f"[killed at the deadline of {deadline:g} s; its stack]\n{stack}"


def _end(ranks: list[_Rank]) -> None:
    for entry in ranks:
        if entry.answer is not None:
            with contextlib.suppress(OSError):
                entry.pipe.send_bytes(b"bye")
    for entry in ranks:
        if entry.answer is not None:
            entry.process.join(10.0)
        if entry.process.exitcode is None:
            entry.process.kill()
            entry.process.join(10.0)
        entry.pipe.close()


def _outcome(entry: _Rank, rank: int, directory: str) -> Outcome:
    path = Path(directory, f"log-{rank}")
    log = (path.read_text(errors="replace") if path.exists() else "") + "".join(entry.extra_log)
    exitcode = entry.process.exitcode
    if entry.answer is None:
        return Outcome(rank, exitcode=exitcode if exitcode is not None else -signal.SIGKILL, log=log)
    if exitcode != 0 and not entry.answer.get("error_types"):
        log += "\n[the function returned, but the process did not end well afterwards]"
        return Outcome(rank, exitcode=exitcode if exitcode is not None else -signal.SIGKILL, log=log)
    return Outcome(rank, log=log, **entry.answer)


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
    stack = open(os.path.join(job.directory, f"stack-{rank}"), "w")  # noqa: SIM115 - open for the process's life
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    # Should the parent be killed, nobody is left to enforce the deadline.
    faulthandler.dump_traceback_later(job.deadline_s + 15.0, exit=True, file=stack)

    _remember_probes()
    answer = _answer(job, rank)
    pipe.send_bytes(pickle.dumps(answer))
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    if answer.get("error_types"):
        os._exit(0)  # tearing down a group with broken connections may hang or abort
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _remember_probes() -> None:
    """Lets this rank try each kind of optimizer once, not for every `ZeroOptimizer`: a fourth of its time."""
    from zerokit.runtime import admission, build

    known: dict[tuple[object, ...], Any] = {}
    trial = admission.probe

    def probe(optimizer_class: Any, options: dict[str, Any], master: Any) -> Any:
        key = (optimizer_class, repr(sorted(options.items())), master)
        if key not in known:
            known[key] = trial(optimizer_class, options, master)
        return known[key]

    vars(build)["probe"] = probe


def _answer(job: _Job, rank: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # torch 2.6's SequentialLR calls its schedulers in a way that they warn of.
            warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step", UserWarning)
            if job.process_group:
                _join_group(job, rank)
            started = time.monotonic()
            value = job.function(*job.args, **job.kwargs)
        answer: dict[str, Any] = {"value": value, "seconds": time.monotonic() - started}
        pickle.dumps(answer)
    except BaseException as error:
        names = tuple(cls.__name__ for cls in type(error).__mro__ if cls is not object)
        return {
            "error_types": names,
            "error": str(error),
            "traceback": traceback.format_exc(),
            "seconds": time.monotonic() - started,
        }
    return answer


def _join_group(job: _Job, rank: int) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    dist.init_process_group(
        "gloo",
        store=FileStore(os.path.join(job.directory, "store"), job.world),
        rank=rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout_s),
    )
