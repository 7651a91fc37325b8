"""A unit in memory: whole parameters as views of one flat storage, and what this rank keeps of it.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from zerokit.errors import UsageError
from zerokit.layout import Interval, Unit
from zerokit.placement import Placement
from zerokit.runtime.collectives import Collectives, Work
from zerokit.runtime.guard import (
    TICKET,
    FlatParameter,
    Guard,
    Guarded,
    Ticket,
    guarded_class,
)
from zerokit.runtime.hooks import profiled
from zerokit.runtime.memory import set_versions, unit_memory


@dataclass(slots=True)
class MasterSlice:
    """What the optimizer updates of one unit and group: `tensor`, elements `interval` of the unit's memory."""

    group: int
    interval: Interval
    tensor: nn.Parameter


class UnitState:
    """The storage of one unit on one rank.

    Args:
        unit: its layout.
        parameters: the model's parameters, in the unit's order; they become views of this storage.
        collectives: how it is gathered.
        dtype: of the storage.
        placement: what of it this rank keeps between uses, and what it updates.
    """

    def __init__(
        self,
        unit: Unit,
        parameters: Sequence[nn.Parameter],
        collectives: Collectives,
        dtype: torch.dtype,
        placement: Placement,
    ) -> None:
        self.unit = unit
        self.parameters = list(parameters)
        self.collectives = collectives
        self.dtype = dtype
        self.placement = placement
        self.device = collectives.device
        self.own = unit.shard(collectives.position)
        self.kept = placement.parameters(unit, collectives.position)
        self.flats: list[MasterSlice] = []
        self.pending: Work | None = None
        self.update: Work | None = None
        """The gather of what other ranks have updated."""
        self.resident = True
        self.guarded = False
        self._watched = False
        """Whether the parameters have been guarded since `note_requires_grad`."""
        self.separate = False
        """Whether masters have memory of their own, in another dtype than the parameters."""
        self.memory = unit_memory(
            unit.numel, self.kept, dtype, self.device, comes_and_goes=placement.cuts_parameters
        )
        self.whole, self.shard = self.memory.whole, self.memory.shard
        self._views = [
            self.whole[part.offset : part.offset + part.parameter.numel].view(part.parameter.shape)
            for part in unit.slices
        ]
        self._base, self._addresses = -1, [0]
        self._note_addresses()
        nothing = torch.full(
            (), float("nan") if dtype.is_floating_point else -1, dtype=dtype, device=self.device
        )
        self._placeholders = [nothing.expand(part.parameter.shape) for part in unit.slices]
        self._asks: weakref.ref[Guard] | None = None
        self._plain: list[type[nn.Parameter]] = []
        self._guarded: list[type[Guarded]] = []
        self._versions: list[int] = []
        self._aliases: list[tuple[int, Tensor, int]] = []
        """Tensors over a parameter's memory that were handed out: its position, the tensor, its version then."""
        self._shown = True
        self.renormed: frozenset[int] = frozenset()
        """Positions of parameters that their module renormalises in forward."""
        self.stopped: set[int] = set()
        """Positions of trainable parameters that require no gradient any more: they are not updated."""

    def adopt(self, initial: Mapping[nn.Parameter, Tensor], master: torch.dtype) -> Tensor:
        """Make the parameters views of this storage; returns the unit's values [numel], in the master dtype.

        Those on `meta` take their values from `initial`. The returned values are to be agreed on with the other
        ranks and handed to `take_initial`: masters start from them, not from what compute rounds them to.
        """
        exact = self.whole
        if self.unit.trainable and master != self.dtype:
            exact = torch.zeros(self.unit.numel, dtype=master, device=self.device)
        with torch.no_grad():
            members = zip(self.parameters, self._views, self.unit.slices, strict=True)
            for parameter, view, part in members:
                target = exact[part.offset : part.offset + part.parameter.numel].view(part.parameter.shape)
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
                parameter.data = view
        self._plain = [type(parameter) for parameter in self.parameters]
        self._guarded = [guarded_class(plain) for plain in self._plain]
        self._versions = [parameter._version for parameter in self.parameters]
        return exact

    def take_initial(self, exact: Tensor) -> None:
        """Take the values that all ranks agreed on, and create what the optimizer updates.

        Where the master dtype is the storage's own, the masters are the storage itself.
        """
        self.separate = exact.dtype != self.dtype
        if self.separate:
            self.whole.copy_(exact)
        if self.placement.cuts_parameters:
            self.memory.store()
            self.free()
        if self.unit.trainable:
            for group, stretch in self.unit.groups_within(
                self.placement.updated(self.unit, self.collectives.position)
            ):
                master = (
                    exact[stretch.start : stretch.stop].clone() if self.separate else self.slice_of(stretch)
                )
                self.flats.append(MasterSlice(group, stretch, nn.Parameter(master)))

    def slice_of(self, interval: Interval) -> Tensor:
        """Elements `interval` (memory coordinates) of what this rank keeps."""
        if self.placement.cuts_parameters:
            return self.shard[interval.start - self.kept.start : interval.stop - self.kept.start]
        return self.whole[interval.start : interval.stop]

    def positions_in(self, flat: MasterSlice) -> list[int]:
        """Which of the unit's parameters have elements in `flat`."""
        return [
            position
            for position, part in enumerate(self.unit.slices)
            if part.parameter.group == flat.group and part.memory.intersection(flat.interval).numel
        ]

    # ---- masters

    def read_in(self) -> None:
        """The opposite: parameters were changed as a whole; refresh this rank's shard and masters.

        Masters of elements that still round to what is there keep their precision.
        """
        self.memory.store()
        with torch.no_grad():
            for flat in self.flats:
                kept = self.slice_of(flat.interval)
                if kept.data_ptr() != flat.tensor.data_ptr():
                    changed = flat.tensor.to(self.dtype) != kept
                    flat.tensor.copy_(torch.where(changed, kept.to(flat.tensor.dtype), flat.tensor))
        self.note_versions()

    def take_exact(self, position: int, values: Tensor) -> None:
        """Masters of parameter `position` take `values` [its shape], which the parameter may hold rounded."""
        part = self.unit.slices[position]
        if values.dtype == self.dtype or values.numel() != part.parameter.numel:
            return
        flattened = values.detach().reshape(-1)
        with torch.no_grad():
            for flat in self.flats:
                both = part.memory.intersection(flat.interval)
                if both.numel and flat.tensor.dtype != self.dtype:
                    target = flat.tensor[both.start - flat.interval.start : both.stop - flat.interval.start]
                    target.copy_(flattened[both.start - part.offset : both.stop - part.offset])

    def suspect(self, position: int, alias: Tensor) -> None:
        """A tensor that shares memory, but no version counter, with a parameter was handed out."""
        self._aliases.append((position, alias, alias._version))

    def note_versions(self) -> None:
        """From now on, other versions of the parameters mean that the user changed them."""
        handed_out = [(position, weakref.ref(alias)) for position, alias, _ in self._aliases]
        self._aliases.clear()
        for position, reference in handed_out:
            if (alias := reference()) is not None:
                self.suspect(position, alias)
        self._versions = self._current_versions()

    def note_update(self) -> None:
        """The optimizer has changed the parameters: graphs made before must not be differentiated any more."""
        torch.autograd.graph.increment_version(self.parameters)
        if self.placement.cuts_parameters or self.separate:
            self._versions = [version + 1 for version in self._versions]

    @property
    def changed(self) -> bool:
        """Whether the user may have changed the parameters in place since `note_versions`."""
        return bool(self._aliases) or self._versions != self._current_versions()

    def _current_versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter._version for parameter in self.parameters]

    def set_trainable(self, position: int, trainable: bool) -> None:
        """The user set `requires_grad`: a parameter can be frozen and unfrozen, but not begin to be trained."""
        layout = self.unit.parameters[position]
        if trainable and not layout.trainable:
            raise UsageError(
                f"parameter {layout.name} was frozen when ZeroOptimizer was built, so nothing would update it: call "
                "requires_grad_(True) before, or build the optimizer anew"
            )
        if layout.trainable:
            (self.stopped.discard if trainable else self.stopped.add)(position)

    # ---- gathering

    def gather(self) -> None:
        """Start gathering the unit; `ready` must follow before its parameters are used."""
        self.complete()
        self.memory.grow()
        self._note_addresses()
        with profiled("gather", self.unit):
            self.pending = self.collectives.all_gather(
                self.unit, self.whole, axes=self.placement.use, own=self.shard
            )
        self.resident = True

    def gather_kept(self) -> None:
        """Gather what this rank keeps from the owners of its shards, and wait for it."""
        memory = self.shard if self.placement.cuts_parameters else self.whole
        axes = [axis for axis in self.collectives.mesh.axes if axis not in self.placement.use]
        self.collectives.all_gather(self.unit, memory, axes=axes).wait()

    def gather_update(self) -> None:
        """Start gathering what the other owners of this rank's parameters have updated."""
        self.complete()
        memory = self.shard if self.placement.cuts_parameters else self.whole
        with profiled("gather", self.unit):
            self.update = self.collectives.all_gather(self.unit, memory, axes=self.placement.update)

    def ready(self) -> None:
        """Wait for a gather in flight, so that the parameters hold their values, and let the model use them."""
        self.complete()
        self.unguard()
        if not self._shown:
            self._shown = True
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.data = view
            set_versions(self.parameters, self._versions)

    def complete(self) -> None:
        """Wait for gathers in flight, and leave the parameters guarded."""
        update, pending = self.update, self.pending
        self.update = self.pending = None
        for work in (update, pending):
            if work is not None:
                with profiled("wait for the gather of", self.unit):
                    work.wait()

    def free(self) -> None:
        """Stage 3: give the gathered unit's memory back; see [Note: freed weights]."""
        self.complete()
        if not self.guarded:
            self._take_replaced()
        if self._shown:
            versions = self._current_versions()
            if self._aliases or versions != self._versions:
                self._require_renorm()
                self.read_in()
            self._shown = False
            with torch._C.DisableTorchFunctionSubclass():
                for parameter, placeholder in zip(self.parameters, self._placeholders, strict=True):
                    parameter.data = placeholder
            set_versions(self.parameters, [version + 1 for version in versions])
        if len(self.placement.use) > 1:
            self.collectives.wait_to_free(self.unit)
        self.memory.shrink()
        self.resident = False
        self.guard()

    # ---- guarding

    def issue_tickets(self, guard: weakref.ref[Guard]) -> None:
        """Let the parameters know the guard to call once they are guarded."""
        me = weakref.ref(self)
        for position, (parameter, layout) in enumerate(
            zip(self.parameters, self.unit.parameters, strict=True)
        ):
            ticket = Ticket(guard, me, self.unit.index, (position,), layout.name)
            parameter.__dict__[TICKET] = ticket
        self._asks = guard
        self.guard_flats()

    def guard_flats(self) -> None:
        """The optimizer is not at work: what it updates has its gradients elsewhere."""
        for flat in self.flats:
            if TICKET not in flat.tensor.__dict__ and self._asks is not None:
                name = f"flat {self.unit.name}"
                flat.tensor.__dict__[TICKET] = Ticket(
                    self._asks, weakref.ref(self), self.unit.index, tuple(self.positions_in(flat)), name
                )
            flat.tensor.__class__ = FlatParameter

    def unguard_flats(self) -> None:
        """The optimizer is about to update them."""
        for flat in self.flats:
            flat.tensor.__class__ = nn.Parameter

    def guard(self) -> None:
        """Guard the parameters; see the module `guard`."""
        if not self.guarded:
            self._take_replaced()
            self.guarded = True
            for parameter, cls in zip(self.parameters, self._guarded, strict=True):
                parameter.__class__ = cls

    def unguard(self) -> None:
        """Let the model compute with the parameters."""
        if self.guarded:
            self.guarded, self._watched = False, False
            for parameter, cls in zip(self.parameters, self._plain, strict=True):
                parameter.__class__ = cls

    def _note_addresses(self) -> None:
        """Where the parameters lie now: memory that came anew may lie elsewhere."""
        if self.whole.data_ptr() != self._base:
            self._base = self.whole.data_ptr()
            self._addresses = [view.data_ptr() for view in self._views]

    def _take_replaced(self) -> None:
        """The model's forward may have given a parameter other memory (`weight.data = …`): take its values over."""
        if not self._shown or [parameter.data_ptr() for parameter in self.parameters] == self._addresses:
            return
        self.check(replaced=True)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
                parameter.data = view
        if self.placement.cuts_parameters:
            self._refuse_change(self.unit.name)
        self.read_in()

    def _refuse_change(self, name: str) -> NoReturn:
        raise UsageError(
            f"the model's forward changes {name}: at stage 3 other ranks may be gathering it at that moment. Change it "
            "after step(), inside `with optimizer.gathered():`, or train at stage 0, 1 or 2"
        )

    def _require_renorm(self) -> None:
        """Weights may change in forward only by an idempotent operation: Embedding's max_norm."""
        pairs = enumerate(zip(self._current_versions(), self._versions, strict=True))
        changed = {position for position, (version, known) in pairs if version != known}
        changed |= {position for position, alias, version in self._aliases if alias._version != version}
        for position in sorted(changed - self.renormed):
            self._refuse_change(self.unit.parameters[position].name)

    def note_requires_grad(self) -> None:
        """Take note of what was frozen or unfrozen while the parameters were not guarded."""
        if self._watched:
            return
        self._watched = self.guarded
        with torch._C.DisableTorchFunctionSubclass():
            trained = [parameter.requires_grad for parameter in self.parameters]
        if self.stopped or trained.count(self.unit.trainable) != len(trained):
            for position, trainable in enumerate(trained):
                self.set_trainable(position, trainable)

    def check(self, *, replaced: bool = False) -> None:
        """Raise `UsageError` if a parameter was re-pointed: updates would be lost silently.

        Guarded parameters refuse that at once; this detects what happened while they were not. `replaced` allows
        memory of the same form. Takes note of parameters that have been frozen meanwhile.
        """
        addresses = self._addresses if self._shown else [p.data_ptr() for p in self._placeholders]
        if [parameter.data_ptr() for parameter in self.parameters] != addresses:
            for parameter, layout, address in zip(
                self.parameters, self.unit.parameters, addresses, strict=True
            ):
                fits = (tuple(parameter.shape), parameter.dtype, parameter.device) == (
                    layout.shape,
                    self.dtype,
                    self.device,
                )
                if parameter.data_ptr() != address and not (replaced and fits):
                    raise UsageError(
                        f"parameter {layout.name} no longer lies in zerokit's storage (found {parameter.dtype} on "
                        f"{parameter.device}, expected {self.dtype} on {self.device}): calling .to(), .float(), "
                        ".half() or assigning .data after ZeroOptimizer was built cuts the parameter off from its "
                        "updates. Do it before, or choose precision="
                    )
        self.note_requires_grad()
