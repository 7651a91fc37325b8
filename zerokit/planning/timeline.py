"""The time of one step, by events along the plans of `zerokit.schedule`. Standard library only.

Devices compute unit by unit, each link carries one collective after another, and whoever needs a result waits for it.
The next gather is in flight before a unit's work begins, and a unit is reduced when its last gradient is there. All
ranks do the same, so one of them is simulated: the cost depends on units, not on ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zerokit.formulas import visits, whole_units
from zerokit.layout import Layout
from zerokit.placement import AnyPlacement, Axis
from zerokit.planning.clock import Clock, Event, Flown
from zerokit.planning.efficiency import Efficiency
from zerokit.planning.hardware import PAGE_BYTES, Cluster
from zerokit.planning.hops import Hops
from zerokit.planning.visiting import Tour
from zerokit.planning.work import ModelWork, newton_schulz
from zerokit.schedule import Kind, lay_out
from zerokit.schedule import Plan as Schedule
from zerokit.sizes import ELSEWHERE, BlockFormat, ElementBytes, stored_bytes


@dataclass(frozen=True)
class StepTime:
    """The planned time of one step.

    Attributes:
        total_s: of the step, as it repeats.
        compute_s: forward, backward and recomputation, by themselves.
        exposed_s: how long a rank waits for collectives of each axis, or moves their bytes itself.
        slowed_s: how much longer work takes because collectives in flight use the same device.
        optimizer_s: norm, clipping and update, of the rank that owns most of what is updated whole.
        limit: what to improve first: "compute", "memory" (the device's), "host", "inner", "outer" or "states".
        events: of one step; of a step of many micro-batches, the first ones and the last.
        visits_s: how long the update waits for masters and states that visit.
    """

    total_s: float
    compute_s: float
    exposed_s: Mapping[Axis, float]
    slowed_s: float
    optimizer_s: float
    limit: str
    events: tuple[Event, ...] = field(repr=False)
    visits_s: float = 0.0

    @property
    def exposed_total_s(self) -> float:
        """Exposed communication of all axes."""
        return sum(self.exposed_s.values())


@dataclass(frozen=True)
class Plan:
    """The setup of a timeline: a model's work on a placement, with bytes per element.

    Attributes:
        work: of one micro-batch.
        layout: for the placement's world.
        placement: the mesh and its stages, of all units or of each.
        sizes: bytes an element.
        micro_batches: of a step.
        reductions: of these, how many reduce gradients.
        kept: units that stay gathered from forward to backward at stage 3; by default those of the rest.
        ranks: those of which the one that updates longest is timed; empty stands for all.
    """

    work: ModelWork
    layout: Layout
    placement: AnyPlacement
    sizes: ElementBytes
    micro_batches: int = 1
    reductions: int = 1
    kept: frozenset[int] | None = None
    ranks: tuple[int, ...] = ()


def step_time(plan: Plan, cluster: Cluster, efficiency: Efficiency) -> StepTime:
    """The planned time of one step. Raises `UsageError` if a link in use is unknown."""
    return _Step(plan, cluster, efficiency).time()


class _Step:
    def __init__(self, plan: Plan, cluster: Cluster, efficiency: Efficiency) -> None:
        self._plan, self._efficiency = plan, efficiency
        self._hops = Hops(plan.placement.mesh, cluster, efficiency)
        self._way = cluster.way_of(plan.sizes.home) if plan.sizes.home in ELSEWHERE else None
        self._clock = Clock()
        self._units = plan.layout.units
        uses = [use.unit for use in plan.work.units]
        kept = plan.kept
        if kept is None:
            kept = frozenset(unit.index for unit in self._units if not unit.scopes)
        first = {unit: use for use, unit in reversed(list(enumerate(uses)))}
        cut, whole = plan.placement.cuts_parameters, whole_units(plan.layout, plan.placement)
        # Backward begins with the unit that forward ended with, which is still there.
        turn = next(([unit] for unit in reversed(uses) if unit not in kept), [])
        trainable = [unit.index for unit in self._units if unit.trainable]
        reduced = [
            [unit] if first[unit] == use and unit in trainable else [] for use, unit in enumerate(uses)
        ]
        # Zeros, from ranks and on behalf of all.
        reduced[:1] = [[*each, *(index for index in trainable if index not in first)] for each in reduced[:1]]
        stops = [(unit,) for unit in uses]
        self._forward = lay_out(stops, kept, 1, whole=whole)
        self._backward = {
            reduces: lay_out(stops[::-1], kept, 1, [*kept, *turn], reduced[::-1] if reduces else (), whole)
            for reduces in (False, True)
        }
        # What comes and goes leaves holes in the heap that gradients do not fit into.
        gradients = sum(self._units[index].numel for index in trainable) * plan.sizes.compute
        pages = (plan.work.fresh_bytes + gradients) / PAGE_BYTES if cut else 0.0
        self._fresh_s = pages * efficiency.page_s
        self._forward_s = [efficiency.seconds(use.forward) for use in plan.work.units]
        self._backward_s = [
            efficiency.seconds(use.backward, backward=True)
            + efficiency.seconds(use.recomputed)
            + (self._bucket_seconds(use.unit) if first[use.unit] == at else 0.0)
            for at, use in enumerate(plan.work.units)
        ]

    def _bucket_seconds(self, index: int) -> float:
        """A unit's gradients are moved to its bucket, or added to what is there."""
        unit, sizes = self._units[index], self._plan.sizes
        if not unit.trainable:
            return 0.0
        accumulated = self._plan.micro_batches > self._plan.reductions
        moved = sizes.compute + sizes.reduce * (2 if accumulated else 1)
        return self._efficiency.moving_seconds(unit.numel * moved)

    def time(self) -> StepTime:
        plan, clock = self._plan, self._clock
        updates = self._gather_updates()
        flown: list[list[Flown]] = []
        repeated = 0.0
        for reduces, times in _runs(plan.micro_batches, plan.reductions):
            before, exposed, slowed = clock.now, dict(clock.exposed), clock.slowed
            self._walk(self._forward, updates, self._forward_s)
            flown += self._walk(self._backward[reduces], {}, self._backward_s[::-1])
            clock.run(self._fresh_s, "fresh memory")
            more = times - 1
            repeated += more * (clock.now - before)
            clock.slowed += more * (clock.slowed - slowed)
            for axis in Axis:
                clock.exposed[axis] += more * (clock.exposed[axis] - exposed[axis])
        for chain in flown:
            clock.wait(chain, "reduce")
        optimizer_s, visits_s = self._update()
        return StepTime(
            clock.now + repeated,
            plan.micro_batches * (sum(self._forward_s) + sum(self._backward_s) + self._fresh_s),
            dict(clock.exposed),
            clock.slowed,
            optimizer_s,
            self._limit(visits_s),
            tuple(clock.events),
            visits_s,
        )

    def _walk(
        self, plan: Schedule, flown: dict[int, list[Flown]], seconds: Sequence[float]
    ) -> list[list[Flown]]:
        """Run through one direction of a micro-batch; `flown` are gathers under way, by unit. Returns reductions."""
        clock, reductions = self._clock, []
        work: tuple[float, str] | None = (
            None  # of the stop that the rank has come to, behind the gathers ahead of it
        )
        for kind, number in plan.operations:
            if kind is Kind.GATHER:
                unit = self._units[number]
                stored = unit.numel * stored_bytes(unit, self._plan.sizes.compute)
                hops = self._hops.gather(self._plan.placement.of_unit(number).use, stored, fresh=True)
                flown[number] = clock.fly(hops, f"gather {number}")
                continue
            if work is not None:
                clock.run(*work)
                work = None
            if kind is Kind.USE:
                (index,) = plan.stops[number]
                clock.wait(flown.pop(index, []), f"gather {index}")
                work = seconds[number], f"run {index}"
            elif kind is Kind.REDUCE:
                reductions.append(self._reduce(number))
        if work is not None:
            clock.run(*work)
        return reductions

    def _reduce(self, index: int) -> list[Flown]:
        """Send a unit's gradients on their way to be summed."""
        unit, sizes = self._units[index], self._plan.sizes
        wire = sizes.reduce if sizes.wire is None else sizes.wire
        exact, back = unit.numel * sizes.reduce, self._plan.placement.of_unit(index).sums
        if isinstance(wire, BlockFormat):
            hops = self._hops.reduce(wire.nbytes(unit.numel), exact, back=back, inner_bytes=exact)
        else:
            hops = self._hops.reduce(unit.numel * wire, exact, back=back)
        own = next((at for at, hop in enumerate(hops) if hop.link_s), len(hops))
        self._clock.wait([(hop, 0.0, 0.0) for hop in hops[:own]], f"reduce {index}")
        return self._clock.fly(hops[own:], f"reduce {index}")

    def _gather_updates(self) -> dict[int, list[Flown]]:
        """After a step, all updated units are gathered, and waited for where the next forward uses them."""
        flown = {}
        for unit in self._units:
            update = self._plan.placement.of_unit(unit.index).update
            if unit.trainable and update:
                hops = self._hops.gather(update, unit.numel * self._plan.sizes.compute)
                flown[unit.index] = self._clock.fly(hops, f"gather {unit.index}")
        return flown

    def _update(self) -> tuple[float, float]:
        """Update all units; returns the seconds of computation, and those in which it waits for states that visit."""
        clock, sizes, placement = self._clock, self._plan.sizes, self._plan.placement
        sent = self._exchange("to owners", sizes.reduce)
        numel, busiest = self._updated_numel(), self._busiest()
        returned: list[list[Flown]] = []
        if self._way is None:
            seconds = self._update_slices(sum(numel.values()), "update")
            seconds += sum(self._update_whole(index, sent[index], busiest, returned) for index in sent)
            visits_s = 0.0
        else:
            rank = placement.mesh.rank(busiest)
            come = visits(self._plan.layout, rank=rank, placement=placement, sizes=sizes)
            tour, seconds = Tour(clock, self._way, sizes.home, come), 0.0
            for number, index in enumerate(come):
                tour.arrive(number)
                seconds += self._update_slices(numel[index], f"update {index}")
                if index in sent:
                    seconds += self._update_whole(index, sent[index], busiest, returned)
                tour.leave(number)
            tour.finish()
            visits_s = tour.waited
        for chain in returned:
            clock.wait(chain, "from owners")
        return seconds, visits_s

    def _busiest(self) -> int:
        """The position of the rank whose whole tensors take longest."""
        wholes, mesh = self._plan.sizes.wholes, self._plan.placement.mesh
        positions = [mesh.position(rank) for rank in self._plan.ranks]
        if wholes is None:
            return positions[0] if positions else 0
        return max(positions or range(mesh.world), key=wholes.owners.loads.__getitem__)

    def _updated_numel(self) -> dict[int, int]:
        """The elements of each trainable unit that a rank updates one by one."""
        placement, wholes = self._plan.placement, self._plan.sizes.wholes
        position = self._busiest() if self._plan.ranks else 0
        whole = frozenset() if wholes is None else wholes.owners.groups
        return {
            unit.index: sum(
                stretch.numel
                for group, stretch in unit.groups_within(
                    placement.of_unit(unit.index).updated(unit, position)
                )
                if group not in whole
            )
            for unit in self._units
            if unit.trainable
        }

    def _update_slices(self, numel: int, name: str) -> float:
        """The norm reads the gradients; the update reads and writes masters and states, and writes parameters."""
        seconds = self._efficiency.moving_seconds(numel * update_bytes(self._plan.sizes))
        self._clock.run(seconds, name)
        return seconds

    def _exchange(self, name: str, element_bytes: int, unit: int | None = None) -> dict[int, list[Flown]]:
        """Send the pieces of whole tensors, of all units or of one, to their owners or back."""
        flown: dict[int, list[Flown]] = {}
        wholes = self._plan.sizes.wholes
        if wholes is None:
            return flown
        for index in wholes.owners.units if unit is None else [unit]:
            crossing = {axis: n * element_bytes for axis, n in wholes.owners.crossings(index).items()}
            flown[index] = self._clock.fly(self._hops.exchange(crossing), f"{name} {index}")
        return flown

    def _update_whole(
        self, index: int, gradients: list[Flown], position: int, returned: list[list[Flown]]
    ) -> float:
        """Update what a rank owns of a unit, behind its gradients; the seconds of computation."""
        clock, sizes = self._clock, self._plan.sizes
        assert sizes.wholes is not None
        clock.wait(gradients, f"to owners {index}")
        owner = self._plan.placement.of_unit(index).owner(position)
        matrix = replace(sizes, states=4, moments=sizes.moments[:1])
        seconds = sum(
            self._efficiency.seconds(newton_schulz(each.shape, each.interval.numel * update_bytes(matrix)))
            for each in sizes.wholes.owners.owned(index, owner)
        )
        clock.run(seconds, f"update {index}")
        returned += self._exchange("from owners", sizes.compute, index).values()
        return seconds

    def _limit(self, visits_s: float) -> str:
        own = self._plan.micro_batches * (sum(self._forward_s) + sum(self._backward_s))
        busy = {**self._clock.busy, "states": visits_s}
        slowest = max(busy, key=busy.__getitem__)
        if busy[slowest] > own:
            return slowest
        return self._efficiency.limit(part for use in self._plan.work.units for part in use.parts)


def update_bytes(sizes: ElementBytes) -> int:
    """Bytes per element that norm and update read and write; moments in fp8 are decoded before and encoded after."""
    master = sizes.master or sizes.compute
    coded = len(sizes.moments) + sum(sizes.moments)
    return 2 * (sizes.reduce + master + sizes.states + coded) + (sizes.compute if sizes.master else 0)


def _runs(micro_batches: int, reductions: int) -> list[tuple[bool, int]]:
    """Micro-batches to simulate, (with reductions, how many it stands for): the second of equal ones repeats."""
    runs = []
    for reduces, count in ((False, micro_batches - reductions), (True, reductions)):
        runs += [(reduces, times) for times in (min(count, 1), count - 1) if times > 0]
    return runs
