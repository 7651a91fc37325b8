"""What ranks tell each other while they save or load: values, and each other's errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from zerokit.errors import CheckpointError, ZerokitError
from zerokit.runtime.collectives import Collectives

T = TypeVar("T")


class Together:
    """The ranks of one optimizer, over a group of their own so that nothing meets the training's messages."""

    def __init__(self, collectives: Collectives) -> None:
        self.rank, self.world = collectives.rank, collectives.world
        self._watch = collectives.watch
        self._group = collectives.side_group() if self.world > 1 else None

    def exchange(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order."""
        if self._group is None:
            return [value]
        gathered: list[T] = [value] * self.world
        with self._watch.waiting("exchange of checkpoint descriptions"):
            dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def each(self, task: Callable[[], T]) -> T:
        """This rank's result of `task`, which every rank runs.

        Raises `CheckpointError` on every rank when it failed on any: all of them say the same.
        """
        cause: Exception | None = None
        result: list[T] = []
        text = ""
        try:
            result.append(task())
        except Exception as error:
            cause = error
            text = str(error) if isinstance(error, ZerokitError) else f"{type(error).__name__}: {error}"
        failed: dict[str, list[int]] = {}
        for rank, said in enumerate(self.exchange((cause is not None, text))):
            if said[0]:
                failed.setdefault(said[1], []).append(rank)
        if failed:
            lines = (f"{self._named(ranks)}{said}" for said, ranks in failed.items())
            raise CheckpointError("; ".join(lines)) from cause
        return result[0]

    def do(self, task: Callable[[], T]) -> list[T]:
        """Every rank's result of `task`, in rank order; errors as in `each`."""
        return self.exchange(self.each(task))

    def on_first(self, task: Callable[[], T]) -> T:
        """Rank 0's result of `task`, which runs there alone; its error is every rank's."""
        found = self.exchange(self.each(lambda: [task()] if self.rank == 0 else []))
        return found[0][0]

    def _named(self, ranks: list[int]) -> str:
        if len(ranks) == self.world:
            return ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
