"""One rank of a launch: it runs a program, ends with who has started it, and records why it failed.

    python -P -m zerokit.launch.rank PROGRAM [arguments]

PROGRAM is a module, or a script if it ends in ".py" or has a "/" in it. The reason goes to the file that
ZEROKIT_ERROR_FILE names.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.machinery
import io
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
import types
import zipfile
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
    sys.argv = [program, *arguments]
    own = program.startswith("zerokit.")
    try:
        if own:  # all that a launch runs of these use torch
            # Python would turn it into an exception, which a rank that waits inside a collective never sees.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            import_torch()
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            _run_as_python_does(program)
    except Exception as error:
        _record(error)
        _show(error)
        if not own:
            atexit._run_exitfuncs()
        _leave(1)
    except KeyboardInterrupt as error:
        _show(error)
        atexit._run_exitfuncs()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _flush()
        os.kill(os.getpid(), signal.SIGINT)
    if own:
        atexit._run_exitfuncs()
        _leave(0)


def _show(error: BaseException) -> None:
    """Show an error as Python does, or as the program wants; where it happened begins with the program's own lines."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((__file__, "<frozen ")):
        trace = trace.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except Exception:
        traceback.print_exc()


def _run_as_python_does(program: str) -> None:
    """Run a script with its folder first on the path, or a module with the working directory there.

    Python prints whole lines at once, as somebody may be reading them.
    """
    _take_devices()
    complete_environment()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # It stays when the program's last line has been run, for threads that then go on.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    path, run_module = str(Path(program).absolute()), vars(runpy)["_run_module_as_main"]
    script = is_script(program)
    packed = script and (Path(path).is_dir() or zipfile.is_zipfile(path))
    if packed or not os.environ.get("PYTHONSAFEPATH"):
        first = path if packed else str(Path(path).resolve().parent if script else Path.cwd())
        sys.path.insert(0, first)
    if packed:
        run_module("__main__", False)
    elif script:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main.__file__, main.__loader__ = path, loader
        exec(loader.source_to_code(loader.get_data(path), path), vars(main))
    else:
        run_module(program)


def complete_environment() -> None:
    """Set what torchrun sets beside the ranks, unless a torchrun has.

    Libraries look for it: Lightning otherwise takes a rank in a Slurm allocation for one of srun's.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    ranks, each = os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]
    os.environ |= {
        "GROUP_WORLD_SIZE": str(int(ranks) // int(each)),
        "ROLE_NAME": "default",
        "ROLE_RANK": os.environ["RANK"],
        "ROLE_WORLD_SIZE": ranks,
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "zerokit",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


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
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(
            AttributeError, ValueError
        ):  # the program may have closed it, or set it to None
            stream.flush()


if __name__ == "__main__":
    die_with_parent(int(os.environ["ZEROKIT_STARTER"]))
    main(sys.argv[1], sys.argv[2:])
