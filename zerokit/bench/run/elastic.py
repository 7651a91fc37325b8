"""The ranks with which an elastic bench continues after some were lost.

Only a signal from outside takes ranks away. An error of the program would come again with fewer ranks, and so would an
end of memory, sooner even.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace
from typing import Any

from zerokit.bench.record.settings import Settings
from zerokit.launch.failures import Failure, WorkerFailed


def remaining(settings: Settings, error: WorkerFailed) -> Settings | None:
    """The settings of a launch with the surviving ranks, at least one; None if no rank was killed.

    Every node has the same number of ranks. So where ranks of some nodes were lost, the bench goes on with the other
    nodes, or with as many ranks of each as the node that lost most still has, whichever are more ranks. Islands go on
    without those that were lost; one that is left alone trains without local steps.
    """
    killed = Counter(one.node for one in _killed(error) if one.node not in error.lost_nodes)
    if not killed and not error.lost_nodes:
        return None
    nodes = settings.nodes - len(error.lost_nodes)
    whole = (nodes - len(killed), settings.nproc_per_node)
    smaller = (nodes, settings.nproc_per_node - max(killed.values(), default=0))
    best = max(whole, smaller, key=lambda shape: min(shape) > 0 and shape[0] * shape[1])
    nodes, ranks = best if min(best) > 0 else (1, 1)
    left: dict[str, Any] = {"nodes": nodes, "nproc_per_node": ranks}
    if settings.every is not None:
        islands = nodes if settings.mesh else nodes * ranks
        if islands == 1:
            left |= {"every": None, "fragments": 1, "delay": 0, "mesh": None}
        elif settings.mesh:
            left["mesh"] = f"{nodes}x{ranks}"
    return replace(settings, **left)


def _killed(error: WorkerFailed) -> list[Failure]:
    """Ranks ended by a signal. Not SIGTERM: agents end the ranks so beside one that failed.

    A rank that has lost its peer may abort; of those that did, one alone is the cause where no other signal was.
    """
    killed = [one for one in error.failures if one.exit_code < 0 and one.exit_code != -signal.SIGTERM]
    sent = [one for one in killed if one.exit_code != -signal.SIGABRT]
    return sent or killed[:1]
