"""Two gloo ranks for benchmarks of collectives: this process, and a second one that follows it.

Both call the same function the same number of times. The follower learns them by name over a pipe.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.runtime.collectives import Collectives, make_collectives

Operation = Callable[[Collectives, Tensor], None]
_TIMEOUT = timedelta(seconds=60)


class Pair:
    """Rank 0's end."""

    def __init__(self, collectives: Collectives, pipe: Connection) -> None:
        self.collectives = collectives
        self._pipe = pipe

    @classmethod
    @contextmanager
    def start(cls) -> Iterator[Pair]:
        """Start the follower; both ranks are gone when the context ends."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        with tempfile.TemporaryDirectory(prefix="zerokit-pair-") as directory:
            follower = context.Process(
                target=_follow, args=(f"file://{directory}/store", theirs), daemon=True
            )
            follower.start()
            try:
                collectives = _join(f"file://{directory}/store", 0)
                yield cls(collectives, ours)
                ours.send(None)
                follower.join(timeout=30)
                dist.destroy_process_group()
            finally:
                follower.kill()
                follower.join()

    def prepare(self, operation: Operation, numel: int, calls: int) -> Callable[[], None]:
        """A function that runs `operation` on `numel` fp32 elements; the follower joins in `calls` times."""
        self._pipe.send((operation, numel, calls))
        tensor = torch.ones(numel)
        return lambda: operation(self.collectives, tensor)


def _join(store: str, rank: int) -> Collectives:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    return make_collectives(group, torch.device("cpu"), _TIMEOUT, units=1)


def _follow(store: str, pipe: Connection) -> None:
    collectives = _join(store, 1)
    while (order := pipe.recv()) is not None:
        operation, numel, calls = order
        tensor = torch.ones(numel)
        for _ in range(calls):
            operation(collectives, tensor)
    dist.destroy_process_group()
