"""When `shares="memory"` is to change the shares of ranks: memory runs out on one, and others have more."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from zerokit.runtime.build import Runtime
from zerokit.runtime.measure import predicted_memory
from zerokit.runtime.recut import RECUT
from zerokit.runtime.shares import cut_by_shares, free_bytes, in_proportion, sharing_memory

EVERY = 100
"""Steps between two looks at what is free, and so at least between two changes of shares."""
_MARGIN = 10
"""Memory runs out where less is free than this part of what was free when the optimizer was built."""


class MemoryWatch:
    """Looks at the free memory of all ranks' devices every `EVERY` steps."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sharing = sharing_memory(runtime.collectives)
        self._margin = free_bytes(runtime.collectives.device, self._sharing) // _MARGIN
        self._steps = itertools.count(1)

    def better_shares(self, *, averaged: bool) -> Sequence[int] | None:
        """Shares by rank that relieve a rank whose memory runs out, if this step looks and there are some. Collective.

        They must leave the rank that has least half a margin more than now: else a change would not pay. Says so on
        stderr. `averaged` if there is an average of the weights.
        """
        if next(self._steps) % EVERY:
            return None
        runtime = self._runtime
        try:
            free = free_bytes(runtime.collectives.device, self._sharing)
        except (OSError, RuntimeError):  # the others would wait: a look that fails asks for nothing
            free = self._margin
        if not runtime.control.sum_now([float(free < self._margin)])[0]:
            return None
        mine = free, self._margin, predicted_memory(runtime, averaged=averaged).total
        everyone = runtime.collectives.all_gather_objects(mine, RECUT)
        shares = in_proportion([free + held for free, _, held in everyone])
        layout = cut_by_shares(runtime.layout, shares, runtime.collectives)
        after = [
            free + held - predicted_memory(runtime, averaged=averaged, rank=rank, layout=layout).total
            for rank, (free, _, held) in enumerate(everyone)
        ]
        least, scarce, margin = min((free, rank, margin) for rank, (free, margin, _) in enumerate(everyone))
        if min(after) - least < margin // 2 or layout.shares == runtime.layout.shares:
            return None
        if runtime.collectives.rank == 0:
            print(
                f"zerokit: rank {scarce} has {least / 1e9:.2f} GB free, and {min(after) / 1e9:.2f} GB remain "
                f"everywhere with shares {', '.join(map(str, shares))} by free memory: recut",
                file=sys.stderr,
            )
        return shares
