"""The costs of a layout: bytes in memory and bytes on the wire, by stage. Standard library only.

The formulas are those of ZeRO (arXiv:1910.02054, §5 and §7), evaluated on a layout's real cuts, padding apart:
for Ψ trainable parameters on N ranks, fp32 and Adam, 16Ψ · 8Ψ+8Ψ/N · 4Ψ+12Ψ/N · 16Ψ/N bytes a rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product

from zerokit.layout import Layout, Unit, is_pooled
from zerokit.placement import AnyPlacement, Axis, Mesh, Placement
from zerokit.schedule import Kind, Order
from zerokit.sizes import ELSEWHERE, FP8_BLOCK, BlockFormat, ElementBytes, StateBytes, stored_bytes


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The bytes that one rank holds between backward and step.

    `parameters`, `gradients` and `optimizer` (masters and states; those of a tensor that is updated whole are its
    owner's) are the paper's three terms for trainable parameters; the other lines are what the paper leaves out.
    `total` is the device's.
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
    host: int = 0
    """Masters and states that are on the host between steps, padding included, and so not in `total`."""
    disk: int = 0
    """Masters and states that are on a disk between steps, padding included, and so not in `total`."""
    transient: int = 0
    """In backward alone, and so not in `total`: the most that gradients of units above the bucket size took at once on
    their way between ranks."""
    exchange: int = 0
    """In step alone, and so not in `total`: the most that gradients and updated values of tensors that are updated
    whole took at once, on their way to this rank that owns them and back."""
    visiting: int = 0
    """In step alone, and so not in `total`: the buffers of masters and states that come from elsewhere."""

    @property
    def total(self) -> int:
        elsewhere = self.host + self.disk
        return sum(self.as_dict().values()) - elsewhere - self.transient - self.exchange - self.visiting

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
"""The kind of memory of the device that each line of a `MemoryReport` is, padding included."""


@dataclass(frozen=True, slots=True)
class Held:
    """Elements that a rank holds between backward and step, `payload` of them without padding."""

    line: str
    unit: int
    payload: int
    numel: int
    element_bytes: int
    visiting: int = 0
    """Bytes that an element takes in the buffers of states that visit."""


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
            states = sizes.of_group(group)
            payload = unit.payload_within(stretch)
            yield from _states(sizes.home, unit.index, payload, stretch.numel, bytes_of.master, states)
            yield Held("scalars", unit.index, states.scalars, states.scalars, 1)
        if wholes is None:
            continue
        for tensor in wholes.owners.owned(unit.index, own.owner(position)):
            # Where parameters come and go, the master has memory of its own in any case.
            master = bytes_of.master or (bytes_of.compute if own.cuts_parameters else 0)
            every, single = wholes.states_of(tensor.group, tensor.shape)
            moments, numel = wholes.moments_of(tensor.group, tensor.shape), tensor.interval.numel
            nbytes = master * numel + every - single - sum(moments) * numel
            yield from _states(sizes.home, unit.index, nbytes, nbytes, 0, StateBytes(1, 0))
            yield from _moments(unit.index, numel, numel, moments)
            yield Held("scalars", unit.index, single, single, 1)


def _states(
    home: str, unit: int, payload: int, numel: int, master: int, states: StateBytes
) -> Iterator[Held]:
    """The masters and states of elements, where they are between steps."""
    wide = master + states.element - sum(states.moments)
    away = home in ELSEWHERE
    yield Held(home if away else "optimizer", unit, payload, numel, wide, wide if away else 0)
    yield from _moments(unit, payload, numel, states.moments)


def _moments(unit: int, payload: int, numel: int, moments: tuple[int, ...]) -> Iterator[Held]:
    """The codes of moments in fp8, and the scales of their blocks."""
    if moments:
        blocks = -(-numel // FP8_BLOCK)
        yield Held("optimizer", unit, payload, numel, len(moments), sum(moments))
        yield Held("optimizer", unit, blocks, blocks, 4 * len(moments))


def visits(layout: Layout, *, rank: int, placement: AnyPlacement, sizes: ElementBytes) -> dict[int, int]:
    """The bytes of masters and states that come to the device in a step, by unit; as many leave it again."""
    found = {unit.index: 0 for unit in layout.units if unit.trainable}
    for one in list_held(layout, rank=rank, placement=placement, sizes=sizes):
        if one.visiting:
            found[one.unit] += one.numel * one.visiting
    return found


def buffers_of(visiting: Collection[int], *, most: int = 2) -> int:
    """The bytes of `most` buffers, in which units take turns, or of one where there is only one unit."""
    return min(len(visiting), most) * max(visiting, default=0)


def padding_line(line: str) -> str:
    """The line of the padding of what stands in `line`: what is elsewhere has it there, too."""
    return line if line in ELSEWHERE else "padding"


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
        lines[padding_line(one.line)] += (one.numel - one.payload) * one.element_bytes
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
    come = visits(layout, rank=rank, placement=placement, sizes=sizes)
    lines["visiting"] = buffers_of(come.values(), most=1 if sizes.home == "fp8" else 2)
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
