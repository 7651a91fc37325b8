"""Workers of a rank outlive the signals that its `StopSignal` takes.

Clusters signal every process of a job, and torchrun the process group of every rank. If a data loader or a pool loses
its workers, the rank fails or waits before it comes to its save. So daemonic children of `multiprocessing` (workers of
data loaders and pools), those of executors and managers, and the fork server pass over a signal while their rank takes
it. A signal that the rank itself sends, such as `terminate()`, and every other one acts as it always does.

Workers may be older than the `StopSignal`. So each is prepared as it starts, in all programs that have imported zerokit
by then, and asks when a signal comes: an open file of the rank, visible in /proc, names the signals that it takes. What
comes to a fork before it has begun is kept back until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.popen_fork
import multiprocessing.process
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTERM,
    signal.SIGXCPU,
)
"""Those by which clusters and terminals end jobs."""

SERVER = "zerokit.fork_server"
"""What fork servers import."""

_LIBRARIES = ("concurrent.futures.", "multiprocessing.")
"""Whose children need not be daemons to be workers."""

_WAKE = signal.SIGRTMAX
"""Lets the main thread of a worker run the handlers of what another thread has received."""

_SET_PDEATHSIG, _GET_PDEATHSIG = 1, 2
"""prctl(2)."""

Handler = Callable[[int, FrameType | None], None]

_forking = threading.local()
"""`mask`: the signals that the thread blocked before it began to fork."""

_replaced: list[tuple[int, Handler, Any]] = []
"""Signals, the handlers installed here, and the ones before them, which workers have."""


@contextlib.contextmanager
def taking(signals: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Handle these signals, and let workers outlive them. In the main thread only; former handlers come back."""
    depth, blocked = len(_replaced), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    fd = os.memfd_create(f"{_mark(os.getpid())}{','.join(str(int(number)) for number in signals)},")
    # torch.multiprocessing.spawn ends its ranks by SIGINT when it dies itself, as by a signal to all.
    interrupts = signal.SIGINT not in signals and _parents_death() == signal.SIGINT
    try:
        for number in signals:
            _replace(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        if interrupts:
            _libc().prctl(_SET_PDEATHSIG, int(signals[0]))
        yield
    finally:
        if interrupts:
            _libc().prctl(_SET_PDEATHSIG, int(signal.SIGINT))
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        while len(_replaced) > depth:
            replaced, _, former = _replaced.pop()
            _install(replaced, former)
        os.close(fd)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _parents_death() -> int:
    """The signal that this process gets when its parent dies; 0 for none."""
    number = ctypes.c_int(0)
    _libc().prctl(_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


def _replace(number: signal.Signals, handler: Handler) -> None:
    _replaced.append((number, handler, signal.signal(number, handler)))


def _install(number: int, former: Any) -> None:
    # A handler that was not installed from Python is None, and cannot be restored.
    signal.signal(number, signal.SIG_DFL if former is None else former)


def _mark(pid: int) -> str:
    return f"zerokit-takes:{pid}:"


def _takes(pid: int, number: int) -> bool:
    """Whether the process takes the signal. A fork of it has its files too, hence its number in the name."""
    start = f"/memfd:{_mark(pid)}"
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed by now
                link = os.readlink(f"/proc/{pid}/fd/{fd}")
                if link.startswith(start) and str(number) in link.removeprefix(start).split(","):
                    return True
    return False


def guard_workers() -> None:
    """Prepare the children that `multiprocessing` makes from now on, and this process where it is one that spawned."""
    _block_while_forking()
    multiprocessing.util.register_after_fork(_begin_child, _begin_child)
    server: Any = multiprocessing.forkserver._forkserver
    preload = getattr(server, "_preload_modules", ["__main__"])
    if SERVER not in preload:
        multiprocessing.set_forkserver_preload([*preload, SERVER])
    # A spawned child imports the main module, and with it zerokit, before it begins.
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        pass_signals_over()
        # It runs nothing that is registered as above.
        setattr(multiprocessing.context.SpawnProcess, "_after_fork", staticmethod(_begin_child))  # noqa: B010


def _block_while_forking() -> None:
    """Let children begin with all signals blocked: until they have, they run the handlers of the rank."""
    launch: Callable[[Any, Any], None] = multiprocessing.popen_fork.Popen._launch  # type: ignore[attr-defined]

    @functools.wraps(launch)
    def launch_blocked(popen: Any, process: Any) -> None:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            launch(popen, process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, _forking.__dict__.pop("mask"))

    if not hasattr(launch, "__wrapped__"):
        setattr(multiprocessing.popen_fork.Popen, "_launch", launch_blocked)  # noqa: B010


def pass_signals_over() -> None:
    """Let this process, a fork server or a spawned child that has not begun, outlive what its parent takes."""
    for number in SIGNALS:
        _replace(number, _pass_over)


def _pass_over(number: int, frame: FrameType | None) -> None:
    if not _takes(os.getppid(), number):
        _install(number, next(former for each, _, former in _replaced if each == number))
        os.kill(os.getpid(), number)


def _begin_child(_: object = None) -> None:
    child, parent = multiprocessing.process.current_process(), multiprocessing.process.parent_process()
    module = getattr(getattr(child, "_target", None), "__module__", None) or ""
    works = child.daemon or module.startswith(_LIBRARIES)
    for number, handler, former in reversed(_replaced):
        if (works or handler is _pass_over) and signal.getsignal(number) == handler:
            _install(number, former)
    mask = _forking.__dict__.get("mask")
    if parent is None or parent.pid is None or not works:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    # Blocked, since torch's workers replace the handler of SIGTERM, and only a waiting thread learns who has sent it.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    signal.signal(_WAKE, lambda *_: None)
    threading.Thread(target=_stand, args=(parent.pid,), name="zerokit signals", daemon=True).start()


def _stand(rank: int) -> None:
    while True:
        found = signal.sigwaitinfo(SIGNALS)
        if found.si_pid == rank or not _takes(rank, found.si_signo):
            _deliver(found.si_signo, by_rank=found.si_pid == rank)


def _deliver(number: int, *, by_rank: bool) -> None:
    if by_rank and number == signal.SIGTERM and signal.getsignal(number) is None:
        os._exit(0)  # as torch's own handler does: its data loaders report workers that end otherwise
    # All other threads block it, so that it acts before `kill` returns.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)
