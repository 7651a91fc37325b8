"""The init duties of a container's first process, so that an image needs no init program.

The kernel treats process 1 apart: a signal for which it has no handler does nothing, so `docker stop` during
the imports would wait for its SIGKILL; and processes whose parents have died become its children and stay
zombies until it waits for them, as the rank of an agent that was killed does.
"""

from __future__ import annotations

import contextlib
import os
import signal

# Those with which engines, schedulers and terminals ask a program for something.
_PASSED_ON = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
    }
)


def leave_process_one() -> None:
    """Return in a child process if this is the container's first process, otherwise at once."""
    if os.getpid() == 1:
        supervise()


def supervise() -> None:
    """Return in a child process; this process forwards signals, reaps orphans, and exits as the child did."""
    waited = _PASSED_ON | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        received = signal.sigwaitinfo(waited)
        if received.si_signo == signal.SIGCHLD:
            if (code := _reap(child)) is not None:
                os._exit(code)
        # Positive: from the kernel. A Ctrl-C at a terminal goes to the whole process group, hence to the child too.
        elif received.si_code <= 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, received.si_signo)


def _reap(child: int) -> int | None:
    """Wait for all that have ended; the exit code of `child` in a shell's terms if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = os.waitstatus_to_exitcode(ended[1])
                code = status if status >= 0 else 128 - status
    return code
