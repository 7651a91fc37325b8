"""Two gloo ranks for benchmarks of collectives: this process, and a second one that follows it.

Both call the same function the same number of times. The follower learns them by name over a pipe.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measuring import beside
from zerokit.runtime.collectives import Collectives, make_collectives

Operation = Callable[[Collectives, Tensor], None]
_TIMEOUT = timedelta(seconds=60)


class Pair:
    """Rank 0's end."""

    def __init__(self, collectives: Collectives, pipe: Connection) -> None:
        self.collectives = collectives
        self._pipe = pipe

    def prepare(self, operation: Operation, numel: int, calls: int) -> Callable[[], None]:
        """A function that runs `operation` on `numel` fp32 elements; the follower joins in `calls` times."""
        self._pipe.send((operation, numel, calls))
        tensor = torch.ones(numel)
        return lambda: operation(self.collectives, tensor)


@contextmanager
def start_pair() -> Iterator[Pair]:
    """Both ranks are gone when the context ends."""
    with tempfile.TemporaryDirectory(prefix="zerokit-pair-") as directory:
        store = f"file://{directory}/store"
        with beside(_follow, store) as pipe:
            yield Pair(_join(store, 0), pipe)
            dist.destroy_process_group()


def _join(store: str, rank: int) -> Collectives:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    return make_collectives(group, torch.device("cpu"), _TIMEOUT, units=1)


def _follow(pipe: Connection, store: str) -> None:
    collectives = _join(store, 1)
    while True:
        operation, numel, calls = pipe.recv()
        tensor = torch.ones(numel)
        for _ in range(calls):
            operation(collectives, tensor)
