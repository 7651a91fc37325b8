"""A unit in memory: parameters as views of one flat storage.

stage 0, 1, 2   `whole` always exists; this rank's `shard` is a view of it
stage 3         `shard` always exists; `whole` has memory while the unit is gathered, see `memory`

[Note: freed weights] Autograd saves weights for backward, as themselves or as views. While a unit is freed (stage 3),
its parameters' version counters stand one higher, so that autograd refuses to read what it saved, as it does after an
in-place change; gathering sets them back. The parameters themselves show nan in their own shape, in no memory, and
are guarded (see `guard`); on Linux hosts the freed memory reads as nan, too. So the memory of a freed weight never
reads as valid values, however it is reached.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from zerokit.errors import UsageError
from zerokit.layout import Interval, Unit
from zerokit.placement import Axis, Placement
from zerokit.runtime.collectives import Collectives, Work
from zerokit.runtime.guard import TICKET, Guarded, Ticket, guarded_class, refuse_moving
from zerokit.runtime.hooks import profiled
from zerokit.runtime.masters import MasterSlice, OwnedUnit
from zerokit.runtime.memory import UnitMemory, set_versions, unit_memory

if TYPE_CHECKING:
    from zerokit.runtime.rounding import Rounding
    from zerokit.runtime.walk import ModelWalk


class State(Enum):
    """The state of a unit's whole parameters in this pass."""

    FREED = "only the shard has memory"
    GATHERING = "on their way, or there and not used yet"
    READY = "in use"
    HELD = "in use, and kept until backward ends: no hook will show when backward has read them"


class UnitState(OwnedUnit):
    """The `parameters` of one unit, views of one storage in `dtype`; forward changes those at `renormed`."""

    def __init__(
        self,
        unit: Unit,
        parameters: Sequence[nn.Parameter],
        collectives: Collectives,
        dtype: torch.dtype,
        placement: Placement,
        renormed: Collection[int] = (),
    ) -> None:
        super().__init__(unit, parameters, collectives, placement)
        self.dtype = dtype
        self.comes_and_goes = placement.cuts_parameters
        """Whether whole parameters have memory only while they are gathered."""
        self.state = State.READY
        self.active = 0  # how many of the unit's modules are at work, one inside the other
        self.guarded = False
        self.stopped: set[int] = set()
        """Positions of trainable parameters that require no gradient any more: they are not updated."""
        self.in_flight: Work | None = None
        """The gather of the unit, or of what other ranks have updated."""
        self.rounding: Rounding | None = None
        """How the unit travels on an int8 or int4 wire, if it does."""
        self.last_sent: Tensor | None = None
        """[updated] This rank's parameters after the last update, once the user has changed some: on a wire that rounds
        updates they are not what masters round to."""
        self._memory = unit_memory(
            unit.numel, self.kept, dtype, self.device, comes_and_goes=self.comes_and_goes
        )
        self.whole, self.shard = self._memory.whole, self._memory.shard
        self._views = unit_views(unit, self.whole)
        self._base, self._addresses = -1, [0]
        nothing = torch.full(
            (), float("nan") if dtype.is_floating_point else -1, dtype=dtype, device=self.device
        )
        self._placeholders = [nothing.expand(part.parameter.shape) for part in unit.slices]
        self._guarded: list[type[Guarded]] = []
        self._versions: list[int] = []
        self._aliases: list[tuple[int, Tensor, int]] = []
        """Tensors over a parameter's memory that were handed out: its position, the tensor, its version then."""
        self._viewed = True  # whether the parameters are views of the storage, and not placeholders
        self._renormed = frozenset(renormed)

    def take_over(self, initial: Mapping[nn.Parameter, Tensor], master: torch.dtype) -> None:
        """Turn the parameters into views of this storage with rank 0's values, and create the masters in their dtype.

        Parameters on `meta` take their values from `initial`. Masters start from the values before compute rounds them.
        """
        self._note_addresses()
        exact = self.whole
        if self.unit.trainable and master != self.dtype:
            exact = torch.zeros(self.unit.numel, dtype=master, device=self.device)
            self.separate = True
        with torch.no_grad():
            members = zip(self.parameters, self._views, unit_views(self.unit, exact), strict=True)
            for parameter, view, target in members:
                target.copy_(initial[parameter] if parameter.is_meta else parameter)
                if parameter.is_meta or parameter.nbytes < parameter.untyped_storage().nbytes():
                    # `.data` cannot cross from meta to a device; swapping keeps the object, so ties and groups hold.
                    # Only then does it become a view: made from one, of this storage or of one that the user has cut
                    # up, it would share a version counter with others, whose changes would be taken for its own.
                    real = nn.Parameter(
                        torch.empty(0, dtype=self.dtype, device=self.device), parameter.requires_grad
                    )
                    real.__dict__.update(parameter.__dict__)
                    torch.utils.swap_tensors(parameter, real)
                    # Hooks stay with the object, but autograd calls those of its new tensor: they are set again.
                    parameter._backward_hooks = parameter._backward_hooks
                    hooks: Any = parameter._post_accumulate_grad_hooks
                    parameter._post_accumulate_grad_hooks = hooks
                parameter.data = view
        self._guarded = [guarded_class(type(parameter)) for parameter in self.parameters]
        self._versions = [parameter._version for parameter in self.parameters]
        self.collectives.broadcast(exact)
        if self.separate:
            self.whole.copy_(exact)
        if self.comes_and_goes:
            self._memory.store()
            self.free()
        if self.unit.trainable:
            for group, stretch in self.unit.groups_within(self.updated):
                values = self.kept_part(stretch)
                if self.separate:
                    values = exact[stretch.start : stretch.stop].clone()
                self.masters.append(MasterSlice(group, stretch, nn.Parameter(values)))

    # ---- changes by the user

    def take_changes(self, *, certain: bool = False) -> None:
        """Refresh shard and masters if the parameters may have changed; what rounds to what is there stays exact."""
        if not certain and not self._aliases and self._versions == self._current_versions():
            return
        self._memory.store()
        with torch.no_grad():
            for master in self.masters if self.separate else ():
                kept = self.kept_part(master.interval)
                values = master.tensor.detach()
                changed = values.to(self.dtype) != kept
                if self.last_sent is not None:
                    start = master.interval.start - self.updated.start
                    changed &= self.last_sent[start : start + kept.numel()] != kept
                values.copy_(torch.where(changed, kept.to(values.dtype), values))
        if self.sends_differences:
            self.last_sent = self.kept_part(self.updated).clone()
        self.note_versions()

    def take_exact(self, position: int, values: Tensor) -> None:
        """Copy `values` [the shape of parameter `position`] to the masters, as the parameter may have rounded them."""
        part = self.unit.slices[position]
        if values.dtype == self.dtype or values.numel() != part.parameter.numel or not self.separate:
            return
        with torch.no_grad():
            for master in self.masters:
                both = part.memory.intersection(master.interval).shifted(-part.offset)
                own = master.part(master.tensor.detach(), part.memory)
                own.copy_(values.detach().reshape(-1)[both.start : both.stop])

    def suspect(self, position: int, alias: Tensor) -> None:
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
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter._version for parameter in self.parameters]

    # ---- gathering

    def gather(self) -> None:
        """Start gathering the unit; `ready` must follow before its parameters are used."""
        self.complete()
        self._memory.grow()
        self._note_addresses()
        gather, axes = self.collectives.all_gather, self.placement.use
        with profiled("gather", self.unit):
            self.in_flight = gather(self.unit, self.whole, axes=axes, own=self.shard)
        if self.state is State.FREED:
            self.state = State.GATHERING

    @property
    def sends_differences(self) -> bool:
        """Whether updates travel as rounded differences between masters and what every rank has."""
        return self.rounding is not None and self.rounding.updates

    def gather_update(self, *, written: bool) -> None:
        """Start gathering updates from the other owners of this rank's parameters, or differences not yet `written`."""
        if self.rounding is not None and self.rounding.updates and not written:
            self.complete()
            self.in_flight = self.rounding.send_update(self.shard)
        else:
            self.gather_from_owners(self.placement.update)

    def gather_from_owners(self, axes: Sequence[Axis] | None = None) -> None:
        """Start gathering this rank's kept memory over `axes`, by default from all ranks that keep the same."""
        self.complete()
        if axes is None:
            axes = [axis for axis in self.collectives.mesh.axes if axis not in self.placement.use]
        with profiled("gather", self.unit):
            self.in_flight = self.collectives.all_gather(self.unit, self.shard, axes=axes)

    def ready(self) -> None:
        """Wait for a gather in flight, so that the parameters hold their values, and let the model use them."""
        self.complete()
        self.unguard()
        if self.state is State.GATHERING:
            self.state = State.READY
        if not self._viewed:
            self._viewed = True
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.data = view
            set_versions(self.parameters, self._versions)

    def complete(self) -> None:
        """Wait for a gather in flight, and leave the parameters guarded."""
        work, self.in_flight = self.in_flight, None
        if work is not None:
            with profiled("wait for the gather of", self.unit):
                work.wait()
            if self.last_sent is not None:
                self.last_sent.copy_(self.kept_part(self.updated))

    def free(self) -> None:
        """Free the gathered unit's memory (stage 3); see [Note: freed weights]."""
        self.complete()
        if not self.guarded:
            self._take_replaced()
        if self._viewed:
            versions = self._current_versions()
            if self._aliases or versions != self._versions:
                self._require_renorm(versions)
                self.take_changes()
            self._viewed = False
            with torch._C.DisableTorchFunctionSubclass():
                for parameter, placeholder in zip(self.parameters, self._placeholders, strict=True):
                    parameter.data = placeholder
            set_versions(self.parameters, [version + 1 for version in versions])
        if len(self.placement.use) > 1:
            self.collectives.wait_to_free(self.unit)
        self._memory.shrink()
        self.state = State.FREED
        self.guard()

    # ---- guarding

    def watch(self, walk: weakref.ref[ModelWalk]) -> None:
        """Guard the parameters from now on, and ask `walk` what may be done with them."""
        for position, known in enumerate(self.unit.parameters):
            self.parameters[position].__dict__[TICKET] = Ticket(walk, self.index, (position,), known.name)
        self.guard_masters()
        self.guard()

    def guard(self) -> None:
        """Guard the parameters while the model does not use them; see the module `guard`."""
        if not self.guarded:
            self._take_replaced()
            self.guarded = True
            for parameter, guarded in zip(self.parameters, self._guarded, strict=True):
                parameter.__class__ = guarded

    def unguard(self) -> None:
        if self.guarded:
            self.guarded = False
            for parameter, guarded in zip(self.parameters, self._guarded, strict=True):
                parameter.__class__ = guarded.plain

    def note_requires_grad(self) -> None:
        """Record frozen and unfrozen parameters; a parameter frozen at construction cannot become trainable."""
        with torch._C.DisableTorchFunctionSubclass():
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
            parameter.data = values[parameter]
        for master in self.masters:
            master.tensor.data = master.tensor.new_empty(0)
        self._memory = UnitMemory(self.whole.new_empty(0), Interval(0, 0))
        self.whole, self.shard = self._memory.whole, self._memory.shard
        self._views.clear()

    def _note_addresses(self) -> None:
        """Where the parameters lie now: memory that came anew may lie elsewhere."""
        if self.whole.data_ptr() != self._base:
            self._base = self.whole.data_ptr()
            self._addresses = [view.data_ptr() for view in self._views]

    def _take_replaced(self) -> None:
        """Take the values of memory that forward gave a parameter (`weight.data = …`), if its form is the same."""
        if not self._viewed or [parameter.data_ptr() for parameter in self.parameters] == self._addresses:
            return
        for parameter, layout, view in zip(self.parameters, self.unit.parameters, self._views, strict=True):
            if parameter.data_ptr() == view.data_ptr():
                continue
            if (parameter.shape, parameter.dtype, parameter.device) != (view.shape, self.dtype, self.device):
                raise refuse_moving(layout.name, parameter, view)
            view.copy_(parameter.detach())
            parameter.data = view
        if self.comes_and_goes:
            self._refuse_change(self.unit.name)
        self.take_changes(certain=True)

    def _require_renorm(self, versions: Sequence[int]) -> None:
        """Weights may change in forward only by an idempotent operation: Embedding's max_norm."""
        pairs = enumerate(zip(versions, self._versions, strict=True))
        changed = {position for position, (version, known) in pairs if version != known}
        changed |= {position for position, alias, version in self._aliases if alias._version != version}
        for position in sorted(changed - self._renormed):
            self._refuse_change(self.unit.parameters[position].name)

    def _refuse_change(self, name: str) -> NoReturn:
        raise UsageError(
            f"the model's forward changes {name}: at stage 3 other ranks may be gathering it at that moment. Change it "
            "after step(), inside `with optimizer.gathered():`, or train at stage 0, 1 or 2"
        )


def unit_views(unit: Unit, flat: Tensor) -> list[Tensor]:
    """Views of `flat` [the unit's elements], one a parameter, each in its parameter's shape."""
    return [flat[s.offset : s.offset + s.parameter.numel].view(s.parameter.shape) for s in unit.slices]


def write_back(units: Sequence[UnitState], *, exact: bool = True) -> None:
    """Copy updated masters into what this rank keeps of the parameters, by one operation; graphs made before end.

    Unless it is to be `exact`, differences are left to the next gather of updates, which brings all ranks the same.
    """
    kept, masters = [], []
    for unit in units:
        for master in unit.masters if unit.separate and (exact or not unit.sends_differences) else ():
            kept.append(unit.kept_part(master.interval))
            masters.append(master.tensor.detach())
    if kept:
        torch._foreach_copy_(kept, masters)
    for unit in units:
        if unit.unit.trainable:
            unit.note_update()
