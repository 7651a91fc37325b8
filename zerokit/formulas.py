"""The costs of a layout: bytes in memory and bytes on the wire, by stage. Standard library only.

The formulas are those of ZeRO (arXiv:1910.02054, §5 and §7), evaluated on a layout's real cuts, padding apart:
for Ψ trainable parameters on N ranks, fp32 and Adam, 16Ψ · 8Ψ+8Ψ/N · 4Ψ+12Ψ/N · 16Ψ/N bytes a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product

from zerokit.layout import Layout, Unit, is_pooled
from zerokit.owners import Owners, Shape
from zerokit.placement import AnyPlacement, Axis, Mesh, Placement
from zerokit.schedule import Kind, Order


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The bytes that one rank holds between backward and step.

    `parameters`, `gradients` and `optimizer` (masters and states; those of a tensor that is updated whole are its
    owner's) are the paper's three terms for trainable parameters; the other lines are what the paper leaves out.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    frozen: int = 0
    buffers: int = 0
    scalars: int = 0
    padding: int = 0
    buckets: int = 0
    gathered: int = 0
    host_copy: int = 0
    """Host memory of background saves."""
    transient: int = 0
    """In backward alone, and so not in `total`: the most that gradients of units above the bucket size took at once on
    their way between ranks."""
    exchange: int = 0
    """In step alone, and so not in `total`: the most that gradients and updated values of tensors that are updated
    whole took at once, on their way to this rank that owns them and back."""

    host: int = 0
    """Masters and states that are in the host's memory between steps. What is elsewhere is not in `total`."""
    disk: int = 0
    """Masters and states that are on a disk between steps."""
    visiting: int = 0
    """In step alone, and so not in `total`: two units' masters and states, which visit from elsewhere."""

    @property
    def total(self) -> int:
        elsewhere = self.host + self.disk
        return sum(self.as_dict().values()) - self.transient - self.exchange - elsewhere - self.visiting

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of collective in a step: calls, and payload received, summed over ranks."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0

    def __add__(self, other: Operation) -> Operation:
        return Operation(self.calls + other.calls, self.elements + other.elements, self.bytes + other.bytes)


@dataclass(slots=True)
class TrafficReport:
    """The traffic of a step. `elements` and `bytes` are received payload without padding, summed over all ranks.

    `received_bytes` arrived at this rank alone, padding included. Control messages (agreement, norms) are apart.
    """

    by_operation: dict[str, Operation] = field(default_factory=dict)
    received_bytes: int = 0
    control_bytes: int = 0
    control_calls: int = 0

    def count(self, name: str, moved: Operation, received_bytes: int = 0) -> None:
        """Add to the operation of this name; so many bytes of it arrived at this rank."""
        self.by_operation[name] = self.by_operation.get(name, Operation()) + moved
        self.received_bytes += received_bytes

    def count_control(self, nbytes: int) -> None:
        """Add a control message."""
        self.control_calls += 1
        self.control_bytes += nbytes

    @property
    def elements(self) -> int:
        return sum(operation.elements for operation in self.by_operation.values())

    @property
    def bytes(self) -> int:
        return sum(operation.bytes for operation in self.by_operation.values())

    def as_dict(self) -> dict[str, object]:
        return {"elements": self.elements, "bytes": self.bytes, **asdict(self)}


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Integers of `bits` in blocks of `block` elements, each with a scale of two bytes."""

    bits: int
    block: int

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements that lie together; the last block may be shorter."""
        return -(-numel * self.bits // 8) + 2 * -(-numel // self.block)

    def unit_nbytes(self, unit: Unit) -> int:
        """Bytes of a unit's payload and of the scales of all its shards."""
        scales = unit.world * -(-unit.cut.piece_numel // self.block)
        return -(-unit.payload_numel * self.bits // 8) + 2 * scales


BLOCK_FORMATS = {"int8": BlockFormat(8, 256), "int4": BlockFormat(4, 128)}
"""The narrow wires: 1.008 and 0.516 bytes an element."""


@dataclass(frozen=True, slots=True)
class Wholes:
    """Tensors that are updated whole: their owners, and by group and shape the bytes of an owner's states of one.

    `states_of` gives those of all states, and those of single numbers among them.
    """

    owners: Owners
    states_of: Callable[[int, Shape], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per element, for each kind of state.

    `master` is 0 where the parameters' own storage serves as master; `states` counts all element states of the
    optimizer together (8 for Adam in fp32), `scalars` bytes of other state for each flat parameter. `wire` is that of
    gradients on their way to be summed, None where it is `reduce`.
    """

    compute: int
    reduce: int
    master: int
    states: int
    scalars: int = 0
    wire: int | BlockFormat | None = None
    differing: Mapping[int, ElementBytes] = field(default_factory=dict)
    """Those of units that compute in another dtype than the rest, by index."""
    groups: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """`states` and `scalars` of optimizer groups that have others, by number."""
    wholes: Wholes | None = None
    """The tensors that are updated whole, if there are any."""

    def of_unit(self, index: int) -> ElementBytes:
        """The bytes per element of a unit."""
        return self.differing.get(index, self)


_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2}
_CAST = ("float32", "bfloat16", "float16")


def stored_bytes(unit: Unit, compute_bytes: int) -> int:
    """Bytes per element of a unit's parameters: frozen ones of unusual dtypes are not cast to the compute dtype."""
    dtype = unit.parameters[0].dtype
    return compute_bytes if unit.trainable or dtype in _CAST else _DTYPE_BYTES.get(dtype, 1)


MEMORY_KINDS = ("parameters", "gradients", "optimizer", "buffers and buckets", "activations")
"""What memory is for. The last is all that torch allocates in a step and nothing holds beyond it."""

KIND_OF_LINE = {
    "parameters": "parameters",
    "frozen": "parameters",
    "gathered": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "scalars": "optimizer",
    "buffers": "buffers and buckets",
    "buckets": "buffers and buckets",
}
"""The kind of memory that each line of a `MemoryReport` is, padding included."""


@dataclass(frozen=True, slots=True)
class Held:
    """Elements that a rank holds between backward and step, `payload` of them without padding."""

    line: str
    unit: int
    payload: int
    numel: int
    element_bytes: int


def list_held(layout: Layout, *, rank: int, placement: AnyPlacement, sizes: ElementBytes) -> Iterator[Held]:
    """The bytes that rank `rank` holds of each unit, by line of `MemoryReport`."""
    position = placement.mesh.position(rank)
    for unit in layout.units:
        own, bytes_of = placement.of_unit(unit.index), sizes.of_unit(unit.index)
        kept = own.parameters(unit, position)
        if not unit.trainable:
            size = stored_bytes(unit, bytes_of.compute)
            yield Held("frozen", unit.index, unit.payload_within(kept), kept.numel, size)
            continue
        yield Held("parameters", unit.index, unit.payload_within(kept), kept.numel, bytes_of.compute)
        summed = own.gradients(unit, position)
        yield Held("gradients", unit.index, unit.payload_within(summed), summed.numel, sizes.reduce)
        wholes = sizes.wholes
        for group, stretch in unit.groups_within(own.updated(unit, position)):
            if wholes is not None and group in wholes.owners.groups:
                continue
            states, scalars = sizes.groups.get(group, (sizes.states, sizes.scalars))
            payload = unit.payload_within(stretch)
            yield Held("optimizer", unit.index, payload, stretch.numel, bytes_of.master + states)
            yield Held("scalars", unit.index, scalars, scalars, 1)
        if wholes is None:
            continue
        for tensor in wholes.owners.owned(unit.index, own.owner(position)):
            # Where parameters come and go, the master has memory of its own in any case.
            master = bytes_of.master or (bytes_of.compute if own.cuts_parameters else 0)
            every, single = wholes.states_of(tensor.group, tensor.shape)
            nbytes = master * tensor.interval.numel + every - single
            yield Held("optimizer", unit.index, nbytes, nbytes, 1)
            yield Held("scalars", unit.index, single, single, 1)


def whole_units(layout: Layout, placement: AnyPlacement) -> frozenset[int]:
    """The units whose parameters are never cut."""
    return frozenset(u.index for u in layout.units if not placement.of_unit(u.index).cuts_parameters)


@dataclass(frozen=True, slots=True)
class Pool:
    """The gradient buckets that small units share: of `fitting` elements each, padding included.

    `most` reductions are in flight at once; 0 where every unit keeps whole gradients, and nothing limits them.
    """

    most: int
    fitting: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout, placement: AnyPlacement) -> Pool:
        """The pool of the units whose gradients are cut."""
        cut = [u for u in layout.units if u.trainable and placement.of_unit(u.index).cuts_gradients]
        most = max((placement.of_unit(unit.index).pooled_buckets for unit in cut), default=0)
        return cls(most, tuple(unit.numel for unit in cut if is_pooled(unit, layout.bucket_bytes)))

    @property
    def buckets(self) -> int:
        """How many there are."""
        return min(self.most, len(self.fitting))

    @property
    def numel(self) -> int:
        """Elements of each."""
        return max(self.fitting, default=0)


def predict_memory(
    layout: Layout,
    *,
    rank: int,
    placement: AnyPlacement,
    sizes: ElementBytes,
    buffers: int = 0,
    reductions: Sequence[int] | None = None,
) -> MemoryReport:
    """The memory report of rank `rank` between backward and step, after the optimizer's first step.

    Args:
        layout: the model's; its world size is N.
        placement: the mesh, and a stage for each axis, of all units or of each.
        sizes: bytes an element.
        buffers: bytes of the model's buffers, which every rank holds whole.
        reductions: units in the order in which their gradients are reduced; by default reversed line order.
    """
    lines = dict.fromkeys((each.name for each in fields(MemoryReport)), 0)
    for one in list_held(layout, rank=rank, placement=placement, sizes=sizes):
        lines[one.line] += one.payload * one.element_bytes
        lines["padding"] += (one.numel - one.payload) * one.element_bytes
    pool = Pool.of(layout, placement)
    lines["buckets"] = pool.buckets * pool.numel * sizes.reduce
    if reductions is None:
        reductions = [unit.index for unit in reversed(layout.units) if unit.trainable]
    # As many reductions are in flight as there would be buckets for them, and these units have buckets of their own.
    own = [
        numel
        if (numel := layout.units[index].numel) > pool.numel and placement.of_unit(index).cuts_gradients
        else 0
        for index in reductions
    ]
    together = (sum(own[at : at + pool.most]) for at in range(len(own)))
    lines["transient"] = max(together, default=0) * sizes.reduce
    lines["buffers"] = buffers
    lines["exchange"] = exchange_bytes(layout, rank=rank, placement=placement, sizes=sizes)
    return MemoryReport(**lines)


def exchange_bytes(layout: Layout, *, rank: int, placement: AnyPlacement, sizes: ElementBytes) -> int:
    """The most that whole tensors on their way to rank `rank`, their owner, and back take at once in a step.

    All gradients arrive first. Unit by unit they are replaced by updated values, which wait for all others. Where
    nothing moves between ranks there is one unit's gradient at a time.
    """
    if sizes.wholes is None:
        return 0
    owners, position, stages = sizes.wholes.owners, placement.mesh.position(rank), []
    for index in owners.units:
        numel = owners.owned_numel(index, placement.of_unit(index).owner(position))
        stages.append((numel, sizes.of_unit(index).compute, bool(owners.crossings(index))))
    most = held = sum(numel for numel, _, moves in stages if moves) * sizes.reduce
    for numel, compute, moves in stages:
        gradients = numel * sizes.reduce
        most = max(most, held if moves else held + gradients)
        held += numel * compute - gradients if moves else 0
        most = max(most, held)
    return most


def operation_name(operation: str, axis: Axis, mesh: Mesh) -> str:
    """The name of a collective in reports; on a mesh of two axes it includes the axis."""
    return operation if mesh.outer == 1 else f"{operation}/{axis.name.lower()}"


def predict_traffic(
    layout: Layout,
    *,
    placement: AnyPlacement,
    sizes: ElementBytes,
    order: Order | None = None,
    micro_batches: int = 1,
    reductions: int = 1,
) -> TrafficReport:
    """The traffic of one step, summed over ranks: on one axis (N-1)·kΨ elements with k = 2, 2, 2 and at most 3.

    Each hop over an axis brings every element to all ranks but one of that axis. At stage 3 gathers are those of the
    plans of `order`, by default the line's. Gathers of sums have the dtype of reduction on any wire. `micro_batches` is
    the number of forward and backward passes, `reductions` of those that reduce gradients.
    """
    mesh = placement.mesh
    wire = sizes.reduce if sizes.wire is None else sizes.wire
    report = TrafficReport()

    def hop(
        operation: str,
        axes: Collection[Axis],
        units: Sequence[Unit],
        times: int,
        size: int | BlockFormat | None,
    ) -> None:
        """The traffic of units over axes, in elements of this size, of their own size, or in blocks."""
        for axis in axes if units else ():
            copies = mesh.copies(axis) * times
            elements = copies * sum(unit.payload_numel for unit in units)
            nbytes = copies * sum(_moved_bytes(unit, size, sizes) for unit in units)
            report.count(
                operation_name(operation, axis, mesh), Operation(times * len(units), elements, nbytes)
            )

    order = order or Order.of_line(layout.units, whole=whole_units(layout, placement))
    gathered = [*order.forward.units(Kind.GATHER), *order.backward.units(Kind.GATHER)]
    alike: dict[Placement, list[Unit]] = {}
    for unit in layout.units:
        alike.setdefault(placement.of_unit(unit.index), []).append(unit)
    for own, units in alike.items():
        trainable = [unit for unit in units if unit.trainable]
        for axis in mesh.axes:
            # Blocks cross the outermost axis only, behind exact sums.
            narrows = mesh.size(axis) > 1 and (axis is mesh.axes[0] or not isinstance(wire, BlockFormat))
            across = wire if narrows else sizes.reduce
            hop("reduce_scatter", [axis], trainable, reductions, across)
        hop("all_gather", own.sums, trainable, reductions, sizes.reduce)
        hop("all_gather", own.update, trainable, 1, None)
        here = {unit.index for unit in units}
        used = [layout.units[index] for index in gathered if index in here]
        hop("all_gather", own.use, used, micro_batches, None)
    if sizes.wholes is not None:
        owners = sizes.wholes.owners
        for index in owners.units:
            widths = {"to_owners": sizes.reduce, "from_owners": sizes.of_unit(index).compute}
            for (axis, elements), (name, width) in product(owners.crossings(index).items(), widths.items()):
                report.count(operation_name(name, axis, mesh), Operation(1, elements, elements * width))
    return report


def _moved_bytes(unit: Unit, size: int | BlockFormat | None, sizes: ElementBytes) -> int:
    if isinstance(size, BlockFormat):
        return size.unit_nbytes(unit)
    return unit.payload_numel * (
        stored_bytes(unit, sizes.of_unit(unit.index).compute) if size is None else size
    )
