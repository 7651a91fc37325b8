"""A unit in memory: parameters as views of one flat storage.

stage 0, 1, 2   `whole` always exists; what this rank keeps is a view of it
stage 3         `kept` always exists; `whole` has memory while the unit is gathered, see `memory`

[Note: freed weights] Autograd saves weights for backward, as themselves or as views. While a unit is freed (stage 3),
its parameters' version counters stand one higher, so that autograd refuses to read what it saved, as it does after an
in-place change; gathering sets them back. The parameters are guarded (see `guard`). On Linux hosts the freed memory
reads as nan, all but this rank's shard; elsewhere the parameters show nan in their own shape, in no memory. So a freed
weight never reads as another step's or another parameter's values, however it is reached.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.errors import UsageError
from zerokit.layout import Interval, Unit
from zerokit.owners import Owners
from zerokit.placement import Axis, Placement
from zerokit.runtime.collectives import Collectives, Exchange, Work
from zerokit.runtime.guard import TICKET, Owner, Ticket, guarded_class, refuse_moving
from zerokit.runtime.homes import Home
from zerokit.runtime.hooks import profiled
from zerokit.runtime.masters import OwnedUnit
from zerokit.runtime.memory import UnitMemory, unit_memory
from zerokit.runtime.shards import Shards
from zerokit.runtime.torch_internals import (
    become,
    change_class,
    point_at,
    set_versions,
    without_torch_function,
)
from zerokit.runtime.use import UnitUse


class UnitState(OwnedUnit, UnitUse):
    """The `parameters` of one unit, views of one storage in `dtype`; forward changes those at `renormed`.

    Its masters are in the dtype `master`.
    """

    def __init__(
        self,
        unit: Unit,
        parameters: Sequence[nn.Parameter],
        collectives: Collectives,
        dtype: torch.dtype,
        master: torch.dtype,
        placement: Placement,
        owners: Owners,
        home: Home,
        renormed: Collection[int] = (),
    ) -> None:
        OwnedUnit.__init__(self, unit, parameters, collectives, placement)
        UnitUse.__init__(self)
        self.dtype, self._master, self.owners, self._home = dtype, master, owners, home
        self.separate = unit.trainable and master != dtype
        self.comes_and_goes = placement.cuts_parameters
        self.stopped: set[int] = set()
        """Positions of trainable parameters that require no gradient any more: they are not updated."""
        self.in_flight: Work | None = None
        """The gather of the unit, or of what other ranks have updated."""
        kept = placement.parameters(unit, collectives.position)
        self._memory = unit_memory(unit, kept, dtype, self.device, comes_and_goes=self.comes_and_goes)
        self._views = self.whole.views()
        with_elements = [at for at, view in enumerate(self._views) if view.numel()]
        self._located = [self.parameters[at] for at in with_elements]
        self._starts = [self._views[at].storage_offset() * dtype.itemsize for at in with_elements]
        self._exchanges: dict[tuple[Axis, ...], Exchange] = {}  # each prepared by its first use
        nothing = torch.full(
            (), float("nan") if dtype.is_floating_point else -1, dtype=dtype, device=self.device
        )
        self._placeholders = [
            nothing.expand(part.parameter.shape) for part in unit.slices if not self._memory.reads_nan
        ]
        """What freed parameters show instead, if the freed memory itself does not read as nan."""
        self._guarded = [guarded_class(type(parameter)) for parameter in parameters]
        self._versions: list[int] = []
        self._aliases: list[tuple[int, Tensor, int]] = []
        """Tensors over a parameter's memory that were handed out: its position, the tensor, its version then."""
        self._viewed = True  # whether the parameters are views of the storage, and not placeholders
        self.renormed = frozenset(renormed)
        self.exact: dict[int, Tensor] | None = None
        """Wider values that parameters were given, by position, where they wait for the end of a context."""

    @property
    def whole(self) -> Shards:
        return self._memory.whole

    @property
    def kept(self) -> Shards:
        return self._memory.kept

    @property
    def keeps_address(self) -> bool:
        """Whether the whole unit's memory stays where it is, though it may read as nan."""
        return not self.comes_and_goes or self._memory.reads_nan

    def take_over(self, initial: Mapping[nn.Parameter, Tensor]) -> None:
        """Turn the parameters into views of this storage with rank 0's values, and create the masters.

        Parameters on `meta` take their values from `initial`. Masters start from the values before compute rounds them.
        """
        exact = self.whole
        if self.separate:
            exact = exact.like(torch.zeros_like(exact.tensor, dtype=self._master))
        with torch.no_grad():
            members = zip(self.parameters, self._views, exact.views(), strict=True)
            for parameter, view, target in members:
                target.copy_(initial[parameter] if parameter.is_meta else parameter)
                if parameter.is_meta or parameter.nbytes < parameter.untyped_storage().nbytes():
                    # `.data` cannot cross from meta to a device; swapping keeps the object, so ties and groups hold.
                    # Only then does it become a view: made from one, of this storage or of one that the user has cut
                    # up, it would share a version counter with others, whose changes would be taken for its own.
                    real = nn.Parameter(
                        torch.empty(0, dtype=self.dtype, device=self.device), parameter.requires_grad
                    )
                    become(parameter, real)
                point_at(parameter, view)
        self._versions = [parameter._version for parameter in self.parameters]
        self.collectives.broadcast(exact.tensor)
        if self.separate:
            self.whole.copy(exact)
        if self.unit.trainable:
            self.take_masters(self.masters_of(exact, self.owners))
            self._home.leave(self)
        if self.comes_and_goes:
            self._memory.store()
            self.free()

    def take_cut(self, unit: Unit, owners: Owners) -> None:
        """Be made anew between passes for another cut of the unit: without masters, in memory that is to be filled.

        The parameters stay the same objects.
        """
        self.unguard()
        made_with = self.dtype, self._master, self.placement, owners, self._home, self.renormed
        stopped = self.stopped
        UnitState.__init__(self, unit, self.parameters, self.collectives, *made_with)
        self.stopped = stopped
        self._show(self._views)
        self._versions = self._current_versions()
        if self.comes_and_goes:
            self.free()
        self.guard()

    def divide(self, inner: Optimizer) -> None:
        with self._home.visiting(self, writes=True):
            super().divide(inner)

    # ---- changes by the user

    def take_changes(self, *, certain: bool = False) -> None:
        """Refresh shard and masters if the parameters may have changed; what rounds to what is there stays exact."""
        if not certain and not self._aliases and self._versions == self._current_versions():
            return
        self._memory.store()
        if any(master.separate for master in self.masters):
            with torch.no_grad(), self._home.visiting(self, writes=True):
                self.refresh_masters()
        self.note_versions()

    def take_exact(self, position: int, values: Tensor) -> None:
        """Copy `values` [the shape of parameter `position`] to the masters, as the parameter may have rounded them."""
        part = self.unit.slices[position]
        if values.dtype == self.dtype or values.numel() != part.parameter.numel or not self.separate:
            return
        if self.exact is not None:
            self.exact[position] = values.detach().clone()
            return
        with torch.no_grad(), self._home.visiting(self, writes=True):
            given = Shards(self.unit, values.detach().reshape(-1), part.memory)
            for master in self.masters:
                master.values.copy(given)

    def keep_exact(self, *, kept: bool) -> None:
        """Keep wider values that parameters are given from now on, if it is to be so, and leave the masters."""
        self.exact = {} if kept else None

    def take_shown(self, source: int | None, given: Sequence[tuple[int, torch.dtype, object]] | None) -> None:
        """Take over what whole parameters show, on every rank.

        Where ranks differ these are rank `source`'s, or rank 0's without one, with the exact values that it was `given`
        (positions and dtypes); collective then. Else `given` is None.
        """
        exact, self.exact = self.exact or {}, None
        if given is not None:
            self.collectives.broadcast(self.whole.tensor, source or 0)
            torch.autograd.graph.increment_version(self.parameters)
            if source is None:
                self._memory.store()
                # Their precision may differ by rank, too.
                with self._home.visiting(self, writes=True):
                    self.refresh_masters(exactly=True)
            elif self.collectives.rank != source:
                exact = {at: torch.empty_like(self._views[at], dtype=dtype) for at, dtype, _ in given}
            for values in exact.values():
                self.collectives.broadcast(values, source or 0)
        for position, values in exact.items():
            self.take_exact(position, values)
        self.take_changes(certain=True)

    def written(self) -> set[int]:
        """Positions of the parameters that were changed in place since `note_versions`; none of a freed unit."""
        if not self._viewed:
            return set()
        pairs = enumerate(zip(self._current_versions(), self._versions, strict=True))
        changed = {position for position, (version, known) in pairs if version != known}
        return changed | {position for position, alias, version in self._aliases if alias._version != version}

    def note_alias(self, position: int, alias: Tensor) -> None:
        """Note that a tensor over a parameter's memory was handed out; it may change elements while it lives."""
        self._aliases.append((position, alias, alias._version))

    def note_versions(self) -> None:
        """Record the parameters' versions; other versions later mean that the user changed them."""
        handed_out = [(position, weakref.ref(alias)) for position, alias, _ in self._aliases]
        self._aliases.clear()
        living = ((position, alias()) for position, alias in handed_out)
        self._aliases = [(position, one, one._version) for position, one in living if one is not None]
        self._versions = self._current_versions()

    def note_update(self) -> None:
        """Invalidate earlier graphs after the optimizer has changed the parameters."""
        torch.autograd.graph.increment_version(self.parameters)
        if self.comes_and_goes or self.separate:
            self._versions = [version + 1 for version in self._versions]

    def _current_versions(self) -> list[int]:
        with without_torch_function():
            return [parameter._version for parameter in self.parameters]

    # ---- gathering

    def gather(self) -> None:
        """Start gathering the unit; `ready` must follow before its parameters are used."""
        self.complete()
        self._memory.grow()
        self._start(self.whole, self.placement.use, self.kept)
        self.note_gather()

    def gather_from_owners(self, axes: Sequence[Axis] | None = None) -> None:
        """Start gathering this rank's kept memory over `axes`, by default from all ranks that keep the same."""
        self.complete()
        if axes is None:
            axes = [axis for axis in self.collectives.mesh.axes if axis not in self.placement.use]
        self._start(self.kept, tuple(axes), None)

    def _start(self, memory: Shards, axes: tuple[Axis, ...], own: Shards | None) -> None:
        if axes not in self._exchanges:
            self._exchanges[axes] = self.collectives.gather(memory, axes=axes, own=own)
        with profiled("gather", self.unit):
            self.in_flight = self._exchanges[axes].start()

    def ready(self) -> None:
        """Wait for a gather in flight, so that the parameters hold their values, and let the model use them."""
        self.complete()
        self.unguard()
        self.note_use()
        if not self._viewed:
            if not self._lie_here():
                self._show(self._views)
            set_versions(self.parameters, self._versions)
            self._viewed = True

    def complete(self) -> None:
        """Wait for a gather in flight, and leave the parameters guarded."""
        if self.in_flight is not None:
            with profiled("wait for the gather of", self.unit):
                self.in_flight.wait()
            self.in_flight = None  # after the wait: an exception there leaves it to be waited for

    def _show(self, data: Sequence[Tensor]) -> None:
        """Point the parameters at these tensors, if there are any."""
        for parameter, shown in zip(self.parameters, data, strict=False):
            point_at(parameter, shown)

    def free(self) -> None:
        """Free the gathered unit's memory (stage 3); see [Note: freed weights]."""
        self.complete()
        if not self.guarded:
            self._take_replaced()
        if self._viewed:
            versions = self._current_versions()
            if self._aliases or versions != self._versions:
                self._require_renorm()
                self.take_changes()
            self._viewed = False
            with without_torch_function():
                self._show(self._placeholders)
            set_versions(self.parameters, [version + 1 for version in versions])
        if len(self.placement.use) > 1:
            self.collectives.wait_to_free(self.unit)
        self._memory.shrink()
        self.note_free()
        self.guard()

    # ---- guarding

    def watch(self, owner: weakref.ref[Owner]) -> None:
        """Guard the parameters from now on, and let them ask `owner` what may be done with them."""
        for position, known in enumerate(self.unit.parameters):
            self.parameters[position].__dict__[TICKET] = Ticket(owner, self.index, (position,), known.name)
        self.guard_masters()
        self.guard()

    @property
    def guarded(self) -> bool:
        """Whether the parameters are guarded."""
        return type(self.parameters[0]) is self._guarded[0]

    def guard(self) -> None:
        """Guard the parameters while the model does not use them; see the module `guard`."""
        if not self.guarded:
            self._take_replaced()
            for parameter, guarded in zip(self.parameters, self._guarded, strict=True):
                change_class(parameter, guarded)

    def unguard(self) -> None:
        if self.guarded:
            for parameter, guarded in zip(self.parameters, self._guarded, strict=True):
                change_class(parameter, guarded.plain)

    def note_requires_grad(self) -> None:
        """Record frozen and unfrozen parameters; a parameter frozen at construction cannot become trainable."""
        with without_torch_function():
            trained = [parameter.requires_grad for parameter in self.parameters]
        if self.unit.trainable:
            self.stopped = {position for position, trains in enumerate(trained) if not trains}
        elif any(trained):
            raise UsageError(
                f"parameter {self.unit.parameters[trained.index(True)].name} was frozen when ZeroOptimizer was built, "
                "so nothing would update it: freeze it after that, or build a new model and optimizer"
            )

    def give_back(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Let the parameters be plain ones again, with these `values`; all other memory goes, and the unit with it."""
        self.unguard()
        self.unguard_masters()
        for parameter in self.parameters:
            parameter.__dict__.pop(TICKET, None)
            point_at(parameter, values[parameter])
        for master in self.masters:
            point_at(master.tensor, master.tensor.new_empty(0))
        self._home.forget(self)
        self.slices.clear()
        self.owned.clear()
        nothing = Interval(0, 0)
        self._memory = UnitMemory(Shards(self.unit, self.whole.tensor.new_empty(0), nothing), nothing)
        self._exchanges.clear()
        self._views.clear()

    def _lie_here(self) -> bool:
        """Whether the parameters lie in this storage, each in its place; they are not guarded."""
        base = self.whole.tensor.data_ptr()
        return [parameter.data_ptr() - base for parameter in self._located] == self._starts

    def _take_replaced(self) -> None:
        """Take the values of memory that forward gave a parameter (`weight.data = …`), if its form is the same."""
        if not self._viewed or self._lie_here():
            return
        for parameter, layout, view in zip(self.parameters, self.unit.parameters, self._views, strict=True):
            if parameter.data_ptr() == view.data_ptr():
                continue
            if (parameter.shape, parameter.dtype, parameter.device) != (view.shape, self.dtype, self.device):
                raise refuse_moving(layout.name, parameter, view)
            view.copy_(parameter.detach())
            point_at(parameter, view)
        if self.comes_and_goes:
            self._refuse_change(self.unit.name)
        self.take_changes(certain=True)

    def _require_renorm(self) -> None:
        """Weights may change in forward only by an idempotent operation: Embedding's max_norm."""
        for position in sorted(self.written() - self.renormed):
            self._refuse_change(self.unit.parameters[position].name)

    def _refuse_change(self, name: str) -> NoReturn:
        raise UsageError(
            f"the model's forward changes {name}: at stage 3 other ranks may be gathering it at that moment. Change it "
            "after step(), inside `with optimizer.gathered():`, or train at stage 0, 1 or 2"
        )
