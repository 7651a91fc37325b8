"""One rank of a launch: it runs a module, ends with who has started it, and records why it failed.

    python -P -m zerokit.launch.rank MODULE [arguments]

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
from pathlib import Path
from typing import NoReturn

from zerokit import files
from zerokit.errors import ZerokitError
from zerokit.launch.processes import die_with_parent, import_torch


def _record(error: Exception) -> None:
    target = Path(os.environ["ZEROKIT_ERROR_FILE"])
    # An error that zerokit raises on purpose is complete; others deserve a traceback.
    expected = isinstance(error, ZerokitError)
    message = f"{'' if expected else f'{type(error).__name__}: '}{error}"
    said = {"message": message, "expected": expected, "time": time.time()}
    files.write_aside(target, json.dumps(said).encode(), durable=False)


def main(module: str, arguments: list[str]) -> None:
    """Run `module` as a program and exit; on an error, record it and exit with code 1.

    At once, because the destructors of a process group whose peers are gone may wait for them, and because threads
    that an engine's library left behind may abort a process that has done its work.
    """
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
