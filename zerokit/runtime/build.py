"""Builds the runtime's parts from a model and an optimizer class.

The model never exists twice: units take its values one by one, and give its old memory back.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerokit.errors import UsageError
from zerokit.layout import Layout, Unit, build_layout, default_bucket_bytes
from zerokit.owners import Owners, default_cost
from zerokit.placement import AnyPlacement, placed, without_lone_axis
from zerokit.runtime.admission import BUILDING, require_agreement
from zerokit.runtime.casts import cast_outputs, compute_dtypes, keep_statistics
from zerokit.runtime.classes import (
    Inner,
    OptimizerClasses,
    classes_of,
    require_shapes,
    row_blocks_of,
    warn_of_unsuited,
)
from zerokit.runtime.collectives import Collectives, make_collectives
from zerokit.runtime.engine import Engine
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.homes import home_of, kind_of, require_codable, room_of
from zerokit.runtime.inner import Part, Several
from zerokit.runtime.masters import Master, write_back
from zerokit.runtime.memory import Heap
from zerokit.runtime.model import Anatomy, Materializer, named_tensors, settings_of, take_apart
from zerokit.runtime.options import (
    Options,
    device_of,
    group_of_this_rank,
    mesh_of,
    require_plain,
    warn_of_widening,
)
from zerokit.runtime.precision import FLOATING
from zerokit.runtime.readers import guard_readers
from zerokit.runtime.shares import cut_by_shares
from zerokit.runtime.step import StepControl
from zerokit.runtime.torch_internals import uncompiled_module
from zerokit.runtime.trials import probe_groups
from zerokit.runtime.unit import UnitState
from zerokit.runtime.walk import WALK, ModelWalk
from zerokit.runtime.weights import WholeWeights
from zerokit.runtime.wholes import WholeTensors


class Runtime:
    """The parts of a `ZeroOptimizer`, and its interface for checkpoints and averages.

    They read and write `masters()`, between `settle` and `publish`, and frozen parameters by `UnitState.kept`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: OptimizerClasses,
        options: Options,
        inner_options: dict[str, Any],
    ) -> None:
        """Take over `model`; arguments and errors as for `ZeroOptimizer`."""
        self.model, self.precision = model, precision = uncompiled_module(model), options.precision
        require_plain(model)
        warn_of_widening(model, precision)

        # What is trained, and in which units.
        group = group_of_this_rank(options.process_group)
        classes = classes_of(model, optimizer_class, options.params, inner_options)
        groups = [one for inner in classes for one in inner.groups]
        device = device_of(model, group)
        classes = [inner.tuned(device, precision.master) for inner in classes]
        tried = [
            probe_groups(
                inner.optimizer_class,
                inner.options,
                precision.master,
                inner.groups,
                in_turns=kind_of(options.states) != "device",
            )
            for inner in classes
        ]
        self.states = [states for states_of_groups in tried for states in states_of_groups]
        """What each group's optimizer keeps for a tensor."""
        warn_of_unsuited(model, groups, self.states)
        numbers = {p: number for number, g in enumerate(groups) for p in g["params"]}
        parts = take_apart(model, options.units, numbers)
        default = default_bucket_bytes(parts.segments)
        bucket_bytes = default if options.bucket_mb is None else int(options.bucket_mb * 2**20)
        stages = settings_of("stage", options.stage, model, parts)
        self._dtypes = settings_of("precision", precision.by_module, model, parts)
        self.layout = build_layout(
            parts.segments,
            world=group.size(),
            bucket_bytes=bucket_bytes,
            settings={name: (repr(stage), self._dtypes[name]) for name, stage in stages.items()},
        )

        # With which ranks, who must all have come for the same.
        of_units = [stages[unit.parameters[0].name] for unit in self.layout.units]
        whole = [number for number, states in enumerate(self.states) if states.whole is not None]
        self.collectives, self.placement = _connect(group, device, options, of_units)
        self.layout = cut_by_shares(self.layout, options.shares, self.collectives)
        rows = row_blocks_of(options.row_blocks, self.layout, whole)
        self.owners = Owners(self.layout, self.placement, whole, rows, options.update_cost or default_cost)
        require_shapes(classes, self.layout, self.owners)
        settings = {
            "stage": str(self.placement),
            "mesh": f"{self.collectives.mesh.outer}x{self.collectives.mesh.inner}",
            "precision": str(precision.as_dict()),
            "prefetch": str(options.prefetch),
            "on_nonfinite": str(options.on_nonfinite),
            "states": kind_of(options.states),
            "shares": str(self.layout.shares or "equal"),
            "optimizer": " + ".join(inner.optimizer_class.__name__ for inner in classes),
            "the owners of whole tensors": str(self.owners),
            **_describe(classes),
        }
        require_agreement(self.layout, settings, self.collectives)
        self.collectives.reporter.distinguish(
            self.collectives.all_gather_objects(secrets.randbits(40), BUILDING)[0]
        )

        # What they hold, and what moves it.
        if kind_of(options.states) == "fp8":
            names = [inner.optimizer_class.__name__ for inner in classes]
            require_codable(names, self.states, precision.master, self.owners)
        rooms = {unit.index: self.room(unit, self.owners) for unit in self.layout.units if unit.trainable}
        self.home = home_of(options.states, rooms, self.collectives)
        self.units = self._take_over(parts, options)
        self.gradients = Gradients(self.units, self.collectives, precision, self.layout, self.placement)
        self.engine = Engine(self.units, self.gradients, self.collectives, options.prefetch)
        casts = [
            *keep_statistics(compute_dtypes(model, precision)),
            *cast_outputs(model, precision, device.type),
        ]
        self.walk = ModelWalk(model, parts, self.engine, precision)
        self.hooks = [*casts, *self.walk.hooks]
        """What was registered in the model, for its release."""
        for number, entry in enumerate(groups):
            entry["params"] = [m.tensor for unit in self.units for m in unit.masters if m.group == number]
        made = [inner.optimizer_class(inner.groups, **inner.options) for inner in classes]
        self.inner = made[0] if len(made) == 1 else Several(made)
        self.home.attach(self.inner)
        ends = list(accumulate(len(inner.groups) for inner in classes))
        self.parts = [
            Part(optimizer, range(end - len(own), end), own)
            for optimizer, own, end in zip(made, tried, ends, strict=True)
        ]
        self.wholes = WholeTensors(self.units, self.gradients, self.collectives, self.owners, self.parts)
        self.weights = WholeWeights(
            model, self.engine, self.collectives, precision.master, self.wholes, self.home
        )
        self.control = StepControl(self.collectives, self.gradients, self.inner)
        # A model outlives its optimizer where a function trains it and returns it.
        if self.placement.cuts_parameters:
            guard_readers()
            model.__dict__[WALK] = self.walk
        else:
            weakref.finalize(self.walk, self.engine.finish_updates).atexit = False

    def _take_over(self, parts: Anatomy, options: Options) -> list[UnitState]:
        """The units, one after the other, with rank 0's values of parameters; and its buffers."""
        model, collectives, precision = self.model, self.collectives, self.precision
        seed, absent = _start_of_rank_0(model, collectives)
        materializer = Materializer(model, parts, options.init_fn, collectives.device, seed, absent)
        heap = Heap(collectives.device, settles=True)
        units = []
        for unit in self.layout.units:
            parameters = [parts.named[parameter.name] for parameter in unit.parameters]
            built = parameters[0].dtype
            dtype = self._dtypes[unit.parameters[0].name] if built in FLOATING else built
            renormed = [
                position
                for position, parameter in enumerate(unit.parameters)
                if all(getattr(owner, "max_norm", None) is not None for owner in parts.owners[parameter.name])
            ]
            placement = self.placement.of_unit(unit.index)
            units.append(
                UnitState(
                    unit,
                    parameters,
                    collectives,
                    dtype,
                    precision.master,
                    placement,
                    self.owners,
                    self.home,
                    renormed,
                )
            )
            units[-1].take_over(materializer.values_of(parameters))
            del parameters
            # Small objects that stay are carved out of each large block that goes: unless its pages are returned, a
            # model built unit by unit still grows to its full size.
            heap.return_freed_memory()
        materializer.fill_buffers()
        for buffer in model.buffers():
            collectives.broadcast(buffer)
        if collectives.device.type == "cuda":
            torch.cuda.empty_cache()  # the model's old memory, block by block, fits nothing that follows
        return units

    def room(self, unit: Unit, owners: Owners) -> int:
        """Bytes for masters and states of a unit on this rank, from the trials."""
        placement, position = self.placement.of_unit(unit.index), self.collectives.position
        master, sizes = self.precision.master.itemsize, []
        for group, stretch in unit.groups_within(placement.updated(unit, position)):
            if group not in owners.groups:
                states = self.states[group]
                sizes += [
                    stretch.numel * master,
                    *[0] * len(states.kinds),
                    stretch.numel * states.element_bytes,
                ]
        for tensor in owners.owned(unit.index, placement.owner(position)):
            whole = self.states[tensor.group].whole
            assert whole is not None
            every, _ = whole.nbytes(tensor.shape)
            sizes += [tensor.interval.numel * master, *[0] * len(whole.kinds(tensor.shape)[1]), every]
        return room_of(sizes)

    def masters(self) -> Iterator[tuple[UnitState, Master, dict[str, Any]]]:
        """The masters that this rank updates, in line order, each with its optimizer state ({} before a step).

        Their elements may be elsewhere: `home` has them.
        """
        for unit in self.units:
            for master in unit.masters:
                yield unit, master, self.inner.state.get(master.tensor, {})

    def take_cut(self, layout: Layout, owners: Owners) -> None:
        """Have this layout from now on, whose units and owners those parts that hold elements have already."""
        self.layout, self.owners = layout, owners
        self.gradients.take_cut()
        self.wholes.take_owners(self.units, owners)
        for number, group in enumerate(self.inner.param_groups):
            group["params"][:] = [m.tensor for unit in self.units for m in unit.masters if m.group == number]

    def settle(self) -> None:
        """Wait until all masters are current and nothing is in flight, so that they may be changed. Collective."""
        self.engine.take_changes()
        self.engine.free_all()

    def publish(self, *, frozen: bool = False) -> None:
        """Update the parameters after the masters, or `frozen` units' shards, were changed. Collective."""

        def write(present: Sequence[UnitState]) -> None:
            write_back(present)
            self.wholes.publish(present)

        self.home.tour(self.units, write, writes=False, agree=self.control.require_all_well)
        if frozen:
            for unit in self.units:
                if not unit.unit.trainable:
                    unit.gather_from_owners()
                    unit.complete()
        self.engine.gather_updated()


def _start_of_rank_0(model: nn.Module, collectives: Collectives) -> tuple[int, frozenset[str]]:
    """Rank 0's seed, and the names of its parameters and buffers on `meta`: of all others every rank gets its values.

    Raises `UsageError`, on every rank, where another one has values that rank 0 has not.
    """
    absent = frozenset(name for name, tensor in named_tensors(model) if tensor.is_meta)
    everyone = collectives.all_gather_objects((torch.initial_seed() % 2**62, absent), BUILDING)
    seed, first = everyone[0]
    for rank, (_, theirs) in enumerate(everyone):
        if not first <= theirs:
            raise UsageError(
                f"rank {rank} has values of {min(first - theirs)}, which rank 0 has on meta, and every rank takes rank "
                "0's: load them on rank 0, or build the model on meta on all ranks"
            )
    return seed, first


def _connect(
    group: dist.ProcessGroup,
    device: torch.device,
    options: Options,
    stages: Sequence[object],
) -> tuple[Collectives, AnyPlacement]:
    """Collectives of zerokit's own among the ranks of `group`, over the mesh that is asked for, and the placement.

    `stages` are those of the units.
    """
    shape = mesh_of(options.mesh, group)
    if shape is not None:
        of_shape = shape
        stages = [without_lone_axis(stage, of_shape)[0] for stage in stages]
        shape = without_lone_axis(0, shape)[1]
        placed(stages, shape)  # raises before anything is made
    packs = options.precision.wire is not None
    collectives = make_collectives(group, device, options.timeout, units=len(stages), mesh=shape, packs=packs)
    return collectives, placed(stages, collectives.mesh)


def _describe(classes: Sequence[Inner]) -> dict[str, str]:
    """Options by name, as text that is equal on ranks that were given the same."""
    groups = [inner.options | group for inner in classes for group in inner.groups]
    return {
        name + (f" of group {number}" if len(groups) > 1 else ""): str(value)
        if value is None or isinstance(value, bool | int | float | str | list | tuple | torch.Tensor)
        else type(value).__qualname__
        for number, group in enumerate(groups)
        for name, value in sorted(group.items())
        if name != "params"
    }
