"""What needs a GPU, in parts that end by themselves: correctness, speed beside peers, and all tests marked `gpu`.

scripts/gpu-check                                  every part, and then the tests without a time limit
scripts/gpu-check --short                          what fits into 445 seconds, the most telling parts first
scripts/gpu-check --short --budget 200             less
scripts/gpu-check --only parity,avg --out results  some parts
scripts/gpu-check --device cpu                     every part at small sizes, on a host

OUT gets results.jsonl (a line for each part), log.txt and traces.tar.gz. Ends with 0 when all is well, 1 when a part
failed, 2 when the words are wrong, 4 when there is no GPU. PYTHON chooses the interpreter; by default it is the one of
.venv, or python3.

The interpreter needs torch, numpy, pytest, psutil and safetensors. Benches and checkpoints also need what this fetches
(3 MB, for CPython 3.12 on x86-64 Linux); --wheels wheels installs it for the time of the check:

{download}
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.frame import Check
from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.wheels import WheelsError, download_command, install
from tests.support.distributed import preload
from zerokit.bench.machine.host import visible_devices

SHORT_S = 445.0
FAILED, USAGE, NO_GPU = 1, 2, 4


def main(words: Sequence[str] | None = None) -> int:
    """Runs the check; returns the program's exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="gpu-check",
        description=__doc__.replace("{download}", download_command()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--short", action="store_true", help=f"what fits into {SHORT_S:.0f} seconds")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds; a part starts only if it fits in")
    parser.add_argument("--only", metavar="A,B", help=f"these parts of {', '.join(names)}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for the files; by default a new folder")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="install these packages for the check")
    options = parser.parse_args(words)
    only = names if options.only is None else options.only.split(",")
    if unknown := sorted(set(only) - set(names)):
        parser.error(f"no part is called {', '.join(unknown)}: they are {', '.join(names)}")
    budget_s = options.budget if options.budget is not None else SHORT_S if options.short else math.inf
    if not budget_s > 0:
        parser.error(f"--budget {budget_s:g} is not positive")
    if options.device == "cuda" and not _has_gpu():
        print("gpu-check: torch finds no CUDA device here; nothing was checked", file=sys.stderr)
        return NO_GPU
    # So that temporary folders go; the guard of the part that runs ends it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="zerokit-wheels-") as site:
        if options.wheels is not None:
            try:
                install(options.wheels, Path(site))
            except WheelsError as error:
                parser.error(str(error))
        out = options.out or Path(tempfile.mkdtemp(prefix="zerokit-gpu-check-"))
        out.mkdir(parents=True, exist_ok=True)
        preload("torch.distributed.fsdp")
        check = Check(out.resolve(), options.device, budget_s)
        return 0 if check.run([part for part in PARTS if part.name in only]) else FAILED


def _has_gpu() -> bool:
    """Asks the management library, and where that knows of none, torch in a process of its own."""
    if visible_devices():
        return True
    ask = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", ask], env=os.environ, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
