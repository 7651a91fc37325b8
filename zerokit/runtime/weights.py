"""Whole weights to keep: exact where the optimizer updates wider masters than the model computes with.

While they are shown, plain parameters with memory of their own stand in the model's modules. So whatever makes a file
or a dictionary of a model (overrides and hooks of `state_dict`, tied weights, adapters) reads them as in plain PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerokit.formulas import TrafficReport
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.engine import Engine
from zerokit.runtime.guard import TICKET, Guarded
from zerokit.runtime.homes import Home
from zerokit.runtime.norms import NUMBERS
from zerokit.runtime.saving import StandIns, Values
from zerokit.runtime.shards import Shards
from zerokit.runtime.unit import UnitState
from zerokit.runtime.wholes import WholeTensors

T = TypeVar("T")

_NONE = -1
"""No unit."""


class WholeWeights:
    """Shows a model's weights whole, current and in the `master` dtype. All ranks take part, unless stated otherwise.

    What is gathered here is not counted as traffic of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        collectives: Collectives,
        master: torch.dtype,
        wholes: WholeTensors,
        home: Home,
    ) -> None:
        self._model, self._engine = weakref.ref(model), engine
        self._collectives, self._master, self._wholes = collectives, master, wholes
        self._home = home
        self.is_shown = False

    @contextmanager
    def shown(self, *, as_built: bool = False) -> Iterator[None]:
        """A context in which the model's modules hold whole weights, for reading.

        Trained weights have the dtype of the masters, frozen ones that of the computation. `as_built` rounds or widens
        each to the dtype that it had when the optimizer was built. Inside `gathered()`, which one rank may read alone,
        the parameters stay what they are there.
        """
        model = self._model()
        assert model is not None
        if self.is_shown or self._engine.is_open:
            yield
            return
        with standing_in(model, self._take(as_built=as_built, all_units=False)):
            self.is_shown = True
            try:
                yield
            finally:
                self.is_shown = False

    def in_turn(self, save: Callable[[], T], *, trained_at_once: bool = False) -> T:
        """What `save` returns, which ranks call one after another; no rank holds more than one whole unit.

        While it runs, tensors on `meta` stand for weights in the dtypes of the model as it was built; the other ranks
        take part in gathering those that it writes, see `StandIns`. What is computed from weights, or written by other
        functions, needs values: then this rank runs `save` again with the whole model. `trained_at_once` gives values
        of trained weights from the start, where these are few. All ranks call it; an exception in `save` is raised
        after the last rank's turn.
        """
        if self.is_shown or self._engine.is_open:
            return save()
        self._engine.make_current()
        self._engine.take_changes()
        done: list[T] = []
        fault: Exception | None = None
        with torch.no_grad(), self._collectives.counting(TrafficReport()):
            for turn in range(self._collectives.world):
                if turn != self._collectives.rank:
                    while (unit := self._agree_on(_NONE)) != _NONE:
                        self._gather(self._engine.units[unit])
                        self._collectives.wait_for_readers()
                    continue
                try:
                    done.append(self._lead(save, trained_at_once=trained_at_once))
                except Exception as error:
                    fault = error
                finally:
                    self._agree_on(_NONE)
        if fault is not None:
            raise fault
        return done[0]

    def _agree_on(self, unit: int) -> int:
        """The unit that the rank whose turn it is wants gathered; others say `_NONE`."""
        wanted = torch.tensor([unit], device=self._collectives.device)
        self._collectives.all_reduce(wanted, dist.ReduceOp.MAX)
        return int(wanted.item())

    def _lead(self, save: Callable[[], T], *, trained_at_once: bool) -> T:
        model = self._model()
        assert model is not None
        dtypes: dict[nn.Parameter, torch.dtype] = {
            p: getattr(torch, built.dtype)
            for unit in self._engine.units
            for p, built in zip(unit.parameters, unit.unit.parameters, strict=True)
        }
        stand_ins = StandIns(dtypes, self._on_demand)
        self.is_shown = True
        try:
            at_once = [p for p in dtypes if trained_at_once and p.requires_grad]
            values = {p: value.to(dtypes[p], copy=True) for p, value in self._on_demand(at_once)}
            try:
                with stand_ins.intercepted(model), standing_in(model, {**stand_ins.tensors, **values}):
                    return save()
            except RuntimeError:  # also torch's own, of tensors on meta
                left = self._on_demand([p for p in dtypes if p not in values])
                values |= {p: value.to(dtypes[p], copy=True) for p, value in left}
            with standing_in(model, values):
                return save()
        finally:
            self.is_shown = False

    def _on_demand(self, parameters: list[nn.Parameter]) -> Values:
        """The whole values of `parameters`, a unit at a time, while the other ranks wait for this one's wishes."""
        wanted = set(parameters)
        for number, unit in enumerate(self._engine.units):
            if not wanted.isdisjoint(unit.parameters):
                self._agree_on(number)
                try:
                    views = zip(unit.parameters, self._gather(unit).views(), strict=True)
                    yield from ((p, view) for p, view in views if p in wanted)
                finally:  # also where a write has failed
                    self._collectives.wait_for_readers()

    def each(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name and whole value, in `dtype` if it is one, in memory of its own; one unit at a time.

        A rank that leaves the loop early takes part in what is left, because the others wait for its pieces.
        """
        units = self._gathered(as_built=False, all_units=True)
        try:
            for unit, whole in units:
                for parameter, view in zip(unit.unit.parameters, whole.views(), strict=True):
                    wanted = view.dtype if dtype is None or not view.is_floating_point() else dtype
                    yield parameter.name, view.to(wanted, copy=True)
        finally:
            for _ in units:
                pass

    def give_back(self) -> dict[nn.Parameter, Tensor]:
        """The whole values of all parameters as they were built, which the units do not manage any more."""
        self._engine.free_all()
        values = self._take(as_built=True, all_units=True)
        self._collectives.wait_for_readers()
        for unit in self._engine.units:
            unit.give_back(values)
        return values

    def _take(self, *, as_built: bool, all_units: bool) -> dict[nn.Parameter, Tensor]:
        """Each parameter's whole value, in memory of its own."""
        taken: dict[nn.Parameter, Tensor] = {}
        for unit, whole in self._gathered(as_built=as_built, all_units=all_units):
            members = zip(unit.parameters, unit.unit.parameters, whole.views(), strict=True)
            for parameter, built, view in members:
                dtype: torch.dtype = getattr(torch, built.dtype) if as_built else view.dtype
                taken[parameter] = view.to(dtype, copy=True)
        return taken

    @torch.no_grad()
    def _gathered(self, *, as_built: bool, all_units: bool) -> Iterator[tuple[UnitState, Shards]]:
        """Units whose parameters are not what is to be shown, or all, each with its whole values for now."""
        # Another rank may still be reading what this one has offered of a unit: one gather of it at a time.
        self._engine.make_current()
        self._engine.take_changes()
        with self._collectives.counting(TrafficReport()):
            moves = False
            for unit in self._engine.units:
                changes = as_built and any(
                    getattr(torch, p.dtype) != unit.dtype for p in unit.unit.parameters
                )
                gathered = unit.comes_and_goes or unit.separate
                if all_units or changes or gathered:
                    yield unit, self._gather(unit)
                    self._collectives.wait_for_readers()
                    moves = moves or gathered
            if moves and self._collectives.runs_ahead:
                # Reading values that never arrive would wait for the device until NCCL's watchdog ends the process.
                self._collectives.sum_soon([0.0] * NUMBERS).read()

    def _gather(self, unit: UnitState) -> Shards:
        """The whole `unit`: its masters, or else its parameters."""
        if not (unit.separate or unit.comes_and_goes):
            return unit.whole
        place = unit.placement
        if not unit.separate:
            whole = unit.whole.like(torch.empty(unit.unit.numel, dtype=unit.dtype, device=unit.device))
            self._collectives.gather(whole, axes=place.use, own=unit.kept).start().wait()
            return whole
        whole = unit.whole.like(torch.zeros(unit.unit.numel, dtype=self._master, device=unit.device))
        with self._home.visiting(unit, writes=False):
            for master in unit.slices:
                whole.copy(master.values)
            self._wholes.spread(unit, lambda master: master.values.tensor, whole).wait()
        self._collectives.gather(whole, axes=(*place.use, *place.update)).start().wait()
        return whole


@contextmanager
def standing_in(model: nn.Module, values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """A context in which plain parameters of these `values` stand in the modules of `model`, tied as their own are."""
    stand_ins = {parameter: _plain(parameter, value) for parameter, value in values.items()}
    held = [
        (module, {n: p for n, p in module._parameters.items() if p is not None and p in stand_ins})
        for module in model.modules()
    ]
    try:
        for module, own in held:
            module._parameters.update({name: stand_ins[parameter] for name, parameter in own.items()})
        yield
    finally:
        for module, own in held:
            module._parameters.update(own)


def _plain(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    kind = type(parameter).plain if isinstance(parameter, Guarded) else type(parameter)
    made = nn.Parameter.__new__(kind, values, parameter.requires_grad)
    made.__dict__.update({name: value for name, value in parameter.__dict__.items() if name != TICKET})
    return made
