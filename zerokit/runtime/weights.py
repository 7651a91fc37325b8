"""Whole weights to keep: exact where the optimizer updates wider masters than the model computes with.

While they are shown, plain parameters with memory of their own stand in the model's modules. So whatever makes a file
or a dictionary of a model (overrides and hooks of `state_dict`, tied weights, adapters) reads them as in plain PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zerokit.formulas import TrafficReport
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.engine import Engine
from zerokit.runtime.guard import TICKET, Guarded
from zerokit.runtime.shards import Shards
from zerokit.runtime.unit import UnitState


class WholeWeights:
    """Shows a model's weights whole, current and in the `master` dtype. All ranks take part, unless stated otherwise.

    What is gathered here is not counted as traffic of a step.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, collectives: Collectives, master: torch.dtype
    ) -> None:
        self._model, self._engine = weakref.ref(model), engine
        self._collectives, self._master = collectives, master
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

    def attend(self) -> None:
        """Take part in `shown()` of ranks that want the weights, and hold one unit at a time."""
        if not self._engine.is_open:
            for _ in self._gathered(as_built=True, all_units=False):
                pass

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
            for unit in self._engine.units:
                changes = as_built and any(
                    getattr(torch, p.dtype) != unit.dtype for p in unit.unit.parameters
                )
                if all_units or changes or unit.comes_and_goes or unit.separate:
                    yield unit, self._gather(unit)
                    self._collectives.wait_for_readers()

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
        for master in unit.masters:
            whole.copy(master.values)
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
