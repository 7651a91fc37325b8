"""One rank of a launch: it runs a module, ends with who has started it, and records why it failed.

    python -P -m zerokit.launch.rank MODULE [arguments]
    python -P -m zerokit.launch.rank -- WORDS         becomes `python WORDS`, a program of the user's

The reason goes to the file that ZEROKIT_ERROR_FILE names.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from zerokit import files
from zerokit.errors import ScheduleError, ZerokitError
from zerokit.launch.failures import says_peer_lost
from zerokit.launch.processes import die_with_parent, import_torch

PROGRAM = "--"
"""In the place of a module: the words behind it are those of Python's command line."""


def _record(error: Exception) -> None:
    target = Path(os.environ["ZEROKIT_ERROR_FILE"])
    # An error that zerokit raises on purpose is complete; others deserve a traceback.
    expected = isinstance(error, ZerokitError)
    message = f"{'' if expected else f'{type(error).__name__}: '}{error}"
    follows = isinstance(error, ScheduleError) or (
        isinstance(error, RuntimeError) and says_peer_lost(message)
    )
    said = {"message": message, "expected": expected, "time": time.time(), "follows": follows}
    files.write_aside(target, json.dumps(said).encode(), durable=False)


def main(module: str, arguments: list[str]) -> None:
    """Run `module` as a program and exit; on an error, record it and exit with code 1.

    At once, because the destructors of a process group whose peers are gone may wait for them, and because threads
    that an engine's library left behind may abort a process that has done its work.
    """
    if module == PROGRAM:
        become_program(arguments, {**os.environ, **_own_devices()})
    # Python would turn it into an exception, which a rank that waits inside a collective never sees.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.argv = [module, *arguments]
    try:
        if module.startswith("zerokit."):  # all that a launch runs of these use torch
            import_torch()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:
        _record(error)
        traceback.print_exc()
        _leave(1)
    atexit._run_exitfuncs()
    _leave(0)


def become_program(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become `python WORDS` in this environment, with what torchrun sets beside the ranks, unless a torchrun has.

    Libraries look for it: Lightning otherwise takes a rank in a Slurm allocation for one of srun's. Python prints at
    once, as somebody may be reading it.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        ranks, each = environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]
        environment = {
            **environment,
            "GROUP_WORLD_SIZE": str(int(ranks) // int(each)),
            "ROLE_NAME": "default",
            "ROLE_RANK": environment["RANK"],
            "ROLE_WORLD_SIZE": ranks,
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "zerokit",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
    os.execve(sys.executable, [sys.executable, "-u", *words], environment)


def _own_devices() -> dict[str, str]:
    """What shows a rank of a simulated node only the devices of this node: programs count them by LOCAL_RANK."""
    nodes = int(os.environ.get("ZEROKIT_NODES_ON_MACHINE", "1"))
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    share = len(devices) // nodes
    if nodes == 1 or share < int(os.environ["LOCAL_WORLD_SIZE"]):
        return {}
    first = int(os.environ["GROUP_RANK"]) * share
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + share])}


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(
            AttributeError, ValueError
        ):  # the program may have closed it, or set it to None
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    die_with_parent(int(os.environ["ZEROKIT_STARTER"]))
    main(sys.argv[1], sys.argv[2:])
