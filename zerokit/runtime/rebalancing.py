"""The part of a `ZeroOptimizer` that changes the shares of ranks while it trains: when asked, or as memory goes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from zerokit.errors import StorageError, UsageError, ZerokitWarning
from zerokit.formulas import TrafficReport
from zerokit.runtime.memory_watch import MemoryWatch
from zerokit.runtime.recut import RECUT, HalfCut, StatesLost, recut
from zerokit.runtime.reports import Reports
from zerokit.runtime.shares import cut_by_shares
from zerokit.runtime.states import HALF_CUT, BetweenIslands, Islands
from zerokit.runtime.step import INTERRUPTED
from zerokit.runtime.torch_internals import in_backward
from zerokit.runtime.walk import ModelWalk


class Rebalancing(Reports):
    """An optimizer whose ranks' shares may change between steps."""

    islands: Islands | None
    local_steps: BetweenIslands | None
    _walk: ModelWalk
    _watch: MemoryWatch | None

    def recut(self, shares: Sequence[int] | str | None = None) -> TrafficReport:
        """Move masters, states and parameters to other `shares` of ranks, as the constructor takes them.

        All ranks call it between steps: after `step()`, with gradients dropped or not. No bit changes, nothing goes
        through a disk that does not live there, and a rank holds one unit more than before meanwhile. The flat tensors
        in `param_groups` and `state` are other ones afterwards; groups, their options, hooks and schedulers stay.

        Returns what has moved: elements that have another owner now, times their bytes.

        Raises:
            UsageError: on all ranks, for shares that do not fit or differ by rank, inside a pass, `accumulate()`,
                `gathered()` and the like, where steps are refused, and for ranks that train apart.
            StorageError: on all ranks where one has no room or cannot read its states. Everything is as before, or
                else, as the error says, steps are refused until a load.
        """
        asked = repr(list(shares) if isinstance(shares, tuple) else shares)
        everyone = self.runtime.collectives.all_gather_objects((self._why_not(), asked), RECUT)
        if refusals := [f"rank {rank}: {why}" for rank, (why, _) in enumerate(everyone) if why]:
            raise UsageError(f"{RECUT} refused: {'; '.join(refusals)}")
        if len({theirs for _, theirs in everyone}) > 1:
            named = ", ".join(f"{theirs} on rank {rank}" for rank, (_, theirs) in enumerate(everyone))
            raise UsageError(f"{RECUT}: shares differ by rank ({named}): all ranks must name the same ones")
        runtime = self.runtime
        self._control.finish()
        layout = cut_by_shares(runtime.layout.for_world(runtime.layout.world), shares, runtime.collectives)
        if layout.shares == runtime.layout.shares:
            return TrafficReport()
        summed = runtime.collectives.any(runtime.gradients.received, RECUT)
        if summed:
            self._walk.finish()
        self.refuse(HALF_CUT)
        try:
            report = recut(runtime, layout, summed=summed, averaged=self.ema is not None)
        except StatesLost:
            self.refuse(INTERRUPTED)
            raise
        except HalfCut:
            raise
        except StorageError:
            self.refuse("")
            raise
        self.refuse("")
        return report

    def _why_not(self) -> str:
        """Why shares cannot change now; "" where they can."""
        runtime = self.runtime
        if self.refusal:
            return self.refusal
        if self.islands is not None or self.local_steps is not None:
            return (
                "ranks that train apart synchronise fixed parts: build the optimizer anew with other shares"
            )
        if self._walk.is_amid_pass or in_backward():
            return "a pass is under way, or a forward pass waits for its backward(): call it after step()"
        if runtime.gradients.mixed:
            return "a backward pass did not finish: call zero_grad() first"
        if runtime.gradients.accumulating or runtime.gradients.partial:
            return "gradients accumulate on this rank alone: finish the step first"
        if runtime.gradients.shown:
            return "inside gathered_gradients(): leave the context first"
        if runtime.engine.is_open or runtime.weights.is_shown:
            return "whole weights are shown, as inside gathered(): leave the context first"
        return ""

    def follow_memory(self) -> None:
        """Recut where `shares="memory"` was asked for, some rank's memory runs out, and others have more."""
        if self._watch is not None and not self.refusal and not self.runtime.engine.is_open:
            shares = self._watch.better_shares(averaged=self.ema is not None)
            if shares is None:
                return
            try:
                self.recut(shares)
            except StorageError as error:
                if self.refusal:
                    raise
                # The step is made, and the ranks go on with the shares that they had.
                warnings.warn(f"shares stay as they are: {error}", ZerokitWarning, stacklevel=2)
