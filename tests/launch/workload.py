"""What the ranks of these tests run: no torch, so that they start at once.

Each rank leaves its environment in FOLDER, then does what it was told.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from zerokit.errors import UsageError


def main(folder: str, what: str, copied: str | None = None) -> None:
    rank = os.environ["RANK"]
    if what == "save":
        signal.signal(signal.SIGTERM, lambda *_: _save(Path(folder, f"saved-{rank}")))
    names = ("WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "OMP_NUM_THREADS", "MASTER_PORT", "ADDED")
    seen = {"pid": os.getpid()} | {name: os.environ.get(name) for name in names}
    temporary = Path(folder, f"{rank}.tmp")
    temporary.write_text(json.dumps(seen))
    temporary.rename(temporary.with_suffix(".json"))
    if copied is not None:  # a file of the job's folder
        path = Path(copied)
        long = {"talk": path.read_bytes() * (3 << 20), "noise": os.urandom(12 << 20)}
        path.with_name(f"result-{rank}").write_bytes(long.get(what, path.read_bytes()))
    if what == "talk":
        for _ in range(100):
            print("0123456789" * 10000)
        print("the last line")
    if what == "speak":
        print("a first word", flush=True)
        while not Path(folder, "heard").exists():
            time.sleep(0.05)
        print("0123456789" * (1 << 17), "a last word")
        sys.stdout.close()
    if what in ("finish", "talk", "noise", "speak"):
        return
    if rank == "1":
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "raise":
            print("0" * (1 << 20), "a last word", file=sys.stderr)
            raise ValueError("a fault of the program")
        if what == "refuse":
            raise UsageError("plain words")
        if what == "exit":
            sys.exit(7)
    time.sleep(1000)


def _save(path: Path) -> None:
    time.sleep(2)
    path.touch()
    sys.exit()


if __name__ == "__main__":
    main(*sys.argv[1:])
