"""What the tests of launches share: a launch's ranks by the files that `workload` leaves, and waiting for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.processes import alive

ROOT = Path(__file__).parents[2]
WORKLOAD = "tests.launch.workload"


def started(folder: Path) -> dict[int, dict[str, Any]]:
    """What each rank has left, by rank."""
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def wait_for(condition: Callable[[], bool], seconds: float = 800.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def all_ended(folder: Path) -> bool:
    """Whether no rank that has begun in `folder` is alive."""
    return not any(alive(rank["pid"]) for rank in started(folder).values())
