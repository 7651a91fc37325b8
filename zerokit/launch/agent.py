"""One node of a local launch: torchrun's agent, which reports failed ranks in a file.

    python -m zerokit.launch.agent REPORT PARENT_PID [options of torchrun] -m MODULE [arguments]

torchrun prints why a rank failed; a launcher that must name the rank and the signal needs it as data.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerokit.launch.processes import StoppedProcesses, die_with_parent, import_torch, own_children

_LOOK_SECONDS = 1.0


def _write(report: Path, content: Mapping[str, Any]) -> None:
    temporary = report.with_suffix(".tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(report)


def main(report: Path, arguments: list[str]) -> int:
    """Run torchrun with `arguments`; returns 0 if every rank of this node succeeded."""
    import_torch()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    stopped = StoppedProcesses()
    threading.Thread(target=_watch, args=(stopped,), daemon=True).start()
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        failures = [
            {
                "rank": rank,
                "pid": failure.pid,
                "exit_code": failure.exitcode,
                "message": stopped.explain(failure.pid) or failure.message,
                "stopped": failure.pid in stopped.killed,
                "time": stopped.killed.get(failure.pid, failure.timestamp),
            }
            for rank, failure in error.failures.items()
        ]
        _write(report, {"failures": failures})
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    except Exception as error:
        _write(report, {"error": f"{type(error).__name__}: {error}"})
        raise
    return 0


def _watch(stopped: StoppedProcesses) -> None:
    while True:
        stopped.look(own_children())
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    # The ranks compare it with their parent's, see `zerokit.launch.rank`.
    os.environ["ZEROKIT_AGENT_PID"] = str(os.getpid())
    sys.exit(main(Path(sys.argv[1]), sys.argv[3:]))
