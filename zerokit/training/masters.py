"""The masters of a `ZeroOptimizer`, for rooms above the runtime: the one place where these reach into its runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zerokit.errors import UsageError
from zerokit.formulas import Operation, TrafficReport
from zerokit.layout import Layout, Unit
from zerokit.runtime.masters import write_back
from zerokit.runtime.optimizer import ZeroOptimizer
from zerokit.runtime.shards import Shards
from zerokit.training.fragments import Part


class Masters:
    """Reads and changes this rank's shards of the masters, in fp32 on the host. All ranks of the optimizer take part.

    What is exchanged here is counted apart from the optimizer's own steps.
    """

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._runtime = optimizer.runtime
        if self._runtime.owners:
            raise UsageError(
                "LocalSteps mixes shards of weights, but optimizers that update whole tensors keep them on owners: "
                "train islands with an elementwise optimizer, such as AdamW, or synchronise in every step"
            )
        self.rank = self._runtime.collectives.rank
        self.layout: Layout = optimizer.layout
        self._traffic = TrafficReport()

    @property
    def model(self) -> nn.Module:
        return self._runtime.model

    def describe(self) -> dict[str, str]:
        """What islands must agree on."""
        inner = self._runtime.inner
        return {
            "layout": self.layout.digest().hex()[:16],
            "stage": str(self._runtime.placement),
            "precision": str(self._runtime.precision.as_dict()),
            "optimizer": type(inner).__name__,
        }

    def settle(self) -> None:
        """Let every earlier change arrive, and nobody read what is about to change."""
        self._runtime.control.finish()
        self._runtime.settle()

    @torch.no_grad()
    def region(self, part: Part) -> Tensor:
        """The masters of a part's region [numel], in fp32."""
        values = torch.zeros(part.numel, dtype=torch.float32)
        for unit, place in part.shards():
            shard, state = Shards(unit, values[place], unit.shard(self.rank)), self._runtime.units[unit.index]
            with self._runtime.home.visiting(state, writes=False):
                for master in state.masters:
                    shard.copy(master.values)
        return values

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Inside, collectives are counted here, and not as the optimizer's own."""
        with self._runtime.collectives.counting(self._traffic):
            yield

    @torch.no_grad()
    def mix(self, shards: Mapping[int, Tensor], weight: float) -> None:
        """Move masters to the values of `shards` (by unit, each this rank's) by `weight`, 1 for all the way.

        Call `settle` before. Parameters are current afterwards, on every rank.
        """
        runtime = self._runtime
        with self._counted():
            states = [runtime.units[index] for index in shards]
            for state in states:
                unit, values = state.unit, shards[state.index].to(state.device)
                given = Shards(unit, values, unit.shard(self.rank))
                if not state.placement.update and not state.placement.use and unit.world > 1:
                    # Every rank of the island updates all of it, and each has brought its own shard.
                    whole = Shards(unit, values.new_zeros(unit.numel))
                    whole.copy(given)
                    runtime.collectives.gather(whole).start().wait()
                    runtime.collectives.wait_for_readers()
                    given = whole
                with runtime.home.visiting(state, writes=True):
                    for master in state.masters:
                        target, new = master.values.at(given.interval), given.at(master.interval)
                        if weight == 1.0:
                            target.copy_(new)
                        else:
                            target.copy_(torch.lerp(target.to(new.dtype), new, weight))
                    write_back([state])
            for state in states:
                if state.placement.update:
                    state.gather_from_owners()
                elif runtime.engine.is_open and state.comes_and_goes:
                    state.gather()  # whole parameters are shown
                state.complete()
            runtime.collectives.wait_for_readers()

    def any(self, condition: bool) -> bool:
        """Whether it holds on some rank of the optimizer."""
        with self._counted():
            return bool(self._runtime.collectives.sum_soon([float(condition)]).read()[0])

    def exchanged(self) -> TrafficReport:
        """What `mix` and `any` have moved between the optimizer's ranks since the last call."""
        moved, self._traffic = self._traffic, TrafficReport()
        return moved

    def predicted_exchange(self, units: Sequence[Unit]) -> dict[str, Operation]:
        """What `mix` of these units must move between the optimizer's ranks."""
        moved = Operation()
        for unit in units:
            placement = self._runtime.placement.of_unit(unit.index)
            if not placement.use:
                size = self._runtime.units[unit.index].dtype.itemsize if placement.update else 4
                elements = (self.layout.world - 1) * unit.payload_numel
                moved += Operation(1, elements, elements * size)
        return {"all_gather": moved} if moved.calls else {}

    @contextmanager
    def frozen(self) -> Iterator[list[Tensor]]:
        """This rank's shards of frozen units, to be changed inside: all ranks of the optimizer have them afterwards."""
        states = [state for state in self._runtime.units if not state.unit.trainable]
        yield [state.kept.at(state.unit.shard(self.rank)) for state in states]
        for state in states:
            state.gather_from_owners()
            state.complete()
