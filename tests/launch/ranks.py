"""What the tests of launches share: a launch's ranks by the files that `workload` leaves, and waiting for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.processes import alive
from zerokit.launch.ranks import threads_per_rank

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


def require_two_nodes(folder: Path, *, ranks_of_a_machine: int) -> None:
    """Two ranks on each have found torchrun's environment, and what was ADDED to it."""
    ranks = started(folder)
    assert sorted(ranks) == [0, 1, 2, 3]
    assert [ranks[rank]["GROUP_RANK"] for rank in range(4)] == ["0", "0", "1", "1"]
    assert [ranks[rank]["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
    assert {rank["WORLD_SIZE"] for rank in ranks.values()} == {"4"}
    assert len({rank["MASTER_PORT"] for rank in ranks.values()}) == 1
    assert {rank["OMP_NUM_THREADS"] for rank in ranks.values()} == {str(threads_per_rank(ranks_of_a_machine))}
    assert {rank["ADDED"] for rank in ranks.values()} == {"yes"}
