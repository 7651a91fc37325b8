"""One rank of a launch: it runs a program, ends with who has started it, and records why it failed.

    python -P -m zerokit.launch.rank PROGRAM [arguments]

PROGRAM is a module, or a script if it ends in ".py" or has a "/" in it. The reason goes to the file that
ZEROKIT_ERROR_FILE names.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from zerokit import files
from zerokit.errors import ScheduleError, ZerokitError
from zerokit.launch.processes import die_with_parent, import_torch

_PEER_LOST = re.compile("closed by peer|reset by peer|broken pipe|remote process exited", re.IGNORECASE)
"""What gloo and NCCL say of a peer that is gone."""


def _record(error: Exception) -> None:
    target = Path(os.environ["ZEROKIT_ERROR_FILE"])
    # An error that zerokit raises on purpose is complete; others deserve a traceback.
    expected = isinstance(error, ZerokitError)
    message = f"{'' if expected else f'{type(error).__name__}: '}{error}"
    follows = isinstance(error, ScheduleError) or (
        isinstance(error, RuntimeError) and _PEER_LOST.search(message) is not None
    )
    said = {"message": message, "expected": expected, "time": time.time(), "follows": follows}
    files.write_aside(target, json.dumps(said).encode(), durable=False)


def main(program: str, arguments: list[str]) -> None:
    """Run the program; on an error, record it and exit with code 1.

    At once, because the destructors of a process group whose peers are gone may wait for them. Modules of zerokit also
    exit at once when they have done their work, because threads that an engine's library left behind may abort the
    process.
    """
    # Python would turn it into an exception, which a rank that waits inside a collective never sees.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.argv = [program, *arguments]
    own = program.startswith("zerokit.")
    try:
        if own:  # all that a launch runs of these use torch
            import_torch()
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            _run_as_python_does(program)
    except Exception as error:
        _record(error)
        traceback.print_exc()
        _leave(1)
    if own:
        atexit._run_exitfuncs()
        _leave(0)


def _run_as_python_does(program: str) -> None:
    """Run a script with its folder first on the path, or a module with the working directory there.

    Python prints whole lines at once, as somebody may be reading them.
    """
    _take_devices()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    script = is_script(program)
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, str(Path(program).resolve().parent) if script else str(Path.cwd()))
    if script:
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def is_script(program: str) -> bool:
    """Whether the name is that of a file, and not of a module."""
    return program.endswith(".py") or os.sep in program


def _take_devices() -> None:
    """Show a rank of a simulated node only the devices of this node: programs count them by LOCAL_RANK."""
    nodes = int(os.environ.get("ZEROKIT_NODES_ON_MACHINE", "1"))
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    share = len(devices) // nodes
    if nodes > 1 and share >= int(os.environ["LOCAL_WORLD_SIZE"]):
        first = int(os.environ["GROUP_RANK"]) * share
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + share])


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
