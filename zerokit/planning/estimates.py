"""Memory and time of single cells: a model's traces, on the layouts and placements of a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerokit.layout import Layout
from zerokit.owners import Owners
from zerokit.placement import AnyPlacement, placed
from zerokit.planning.cells import Cell, Division, PlannedCell, Question
from zerokit.planning.efficiency import Efficiency
from zerokit.planning.hardware import Cluster
from zerokit.planning.memory import PlannedMemory, StepMemory, element_sizes
from zerokit.planning.recording import ModelTrace
from zerokit.planning.replay import Step
from zerokit.planning.subject import Subject
from zerokit.planning.timeline import Plan as Timed
from zerokit.planning.timeline import StepTime, step_time
from zerokit.planning.trace import Traces
from zerokit.runtime.precision import Precision
from zerokit.sizes import ELSEWHERE, ElementBytes


@dataclass(frozen=True)
class Setup:
    """What a cell's state is cut by: a layout, a placement on it, and bytes an element."""

    layout: Layout
    placement: AnyPlacement
    sizes: ElementBytes


class Estimates:
    """Estimates of cells. What several of them share is computed once.

    Args:
        subject: the model.
        question: devices, links and settings.
        traces: of the model, as the question has it.
    """

    def __init__(self, subject: Subject, question: Question, traces: Traces) -> None:
        self._subject, self._question, self._traces = subject, question, traces
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._setups: dict[tuple[object, ...], Setup] = {}
        self._steps: dict[tuple[object, ...], StepMemory] = {}

    def trace(self, samples: int, precision: str, recompute: bool) -> ModelTrace:
        """The trace of a micro-batch. Raises `UsageError` for a model that cannot be traced."""
        return self._traces.get(samples, precision, recompute=recompute)

    def plan(self, cell: Cell) -> PlannedCell:
        """The memory of a cell on equal ranks, and its time where it fits."""
        question = self._question
        setup = self.setup(cell)
        planned = PlannedCell(
            cell,
            self.memory(cell, setup),
            question.room_bytes,
            division=division_of(setup),
            away_room_bytes=self._away_room(cell.states),
        )
        efficiency = question.efficiencies.get(cell.precision)
        if efficiency is None or planned.missing_bytes or not knows_way(question.cluster, cell.states):
            return planned
        return self.timed(planned, self.time(cell, setup, question.cluster, efficiency))

    def timed(self, planned: PlannedCell, time: StepTime) -> PlannedCell:
        """The cell with the time of its step, and the rates that follow from it."""
        cell = planned.cell
        trace = self.trace(cell.micro_batch, cell.precision, cell.recompute)
        units_per_s = trace.work.tokens * cell.accumulate / time.total_s
        peak = self._question.cluster.device.flops.get(cell.precision)
        flops = self._subject.flops_per_unit or _counted(trace)
        mfu = units_per_s * flops / peak if peak else None
        return replace(planned, time=time, units_per_s=units_per_s, mfu=mfu)

    # ---- of some ranks

    def setup(self, cell: Cell, shares: Sequence[int] = ()) -> Setup:
        """What a cell's state is cut by where ranks have these shares; without any, equal ones.

        Made once: owners of thousands of matrices take a while.
        """
        key = cell.mesh, cell.stages, cell.precision, cell.states, tuple(shares)
        if key not in self._setups:
            trace = self.trace(cell.micro_batch, cell.precision, cell.recompute)
            rest = cell.stages if cell.mesh.outer > 1 else cell.stages[1]
            by_position = [shares[cell.mesh.rank(position)] for position in range(len(shares))]
            layout = self._layout(trace, by_position)
            stages = [trace.own_stages.get(unit.index, rest) for unit in layout.units]
            placement = placed(stages, cell.mesh)
            precision = Precision.of(cell.precision)
            sizes = element_sizes(precision, self._question.optimizer, layout, placement, cell.states)
            self._setups[key] = Setup(layout, placement, sizes)
        return self._setups[key]

    def _layout(self, trace: ModelTrace, shares: Sequence[int]) -> Layout:
        key = tuple(shares)
        if key not in self._layouts:
            self._layouts[key] = trace.layout.for_world(self._question.world, shares)
        return self._layouts[key]

    def memory(
        self, cell: Cell, setup: Setup, ranks: tuple[int, ...] = (), samples: int | None = None
    ) -> PlannedMemory:
        """The memory of the fullest of these ranks, of all by default, with so many samples in a micro-batch."""
        trace = self.trace(samples or cell.micro_batch, cell.precision, cell.recompute)
        key = id(setup), min(cell.accumulate, 3), id(trace.events), ranks
        if key not in self._steps:
            question = self._question
            step = Step(setup.layout, setup.placement, setup.sizes, question.on_cuda, question.nodes, ranks)
            self._steps[key] = StepMemory(trace, step, accumulate=cell.accumulate)
        return self._steps[key].of(trace)

    def time(
        self,
        cell: Cell,
        setup: Setup,
        cluster: Cluster,
        efficiency: Efficiency,
        ranks: tuple[int, ...] = (),
        samples: int | None = None,
    ) -> StepTime:
        """The time of a step of these ranks, which have such devices and so many samples in a micro-batch."""
        trace = self.trace(samples or cell.micro_batch, cell.precision, cell.recompute)
        timed = Timed(
            trace.work,
            setup.layout,
            setup.placement,
            setup.sizes,
            micro_batches=cell.accumulate,
            ranks=ranks,
        )
        return step_time(timed, cluster, efficiency)

    def _away_room(self, home: str) -> int | None:
        """A rank's share of what its node's host or disk has room for."""
        cluster = self._question.cluster
        room = node_room(cluster, home)
        return None if room is None else room // cluster.ranks_per_node


def knows_way(cluster: Cluster, home: str) -> bool:
    """Whether the way of states to this home is known, or there is none."""
    return home not in ELSEWHERE or cluster.way(home) is not None


def node_room(cluster: Cluster, home: str) -> int | None:
    """What a node's host or disk has room for; None where it is not known or no states are there."""
    way = cluster.way(home) if home in ELSEWHERE else None
    return None if way is None else way.room_bytes


def division_of(setup: Setup) -> Division | None:
    """How updates of whole tensors are divided among ranks, if there are any."""
    sizes = setup.sizes
    if sizes.wholes is None:
        return None
    owners: Owners = sizes.wholes.owners
    moved = {index: sum(owners.crossings(index).values()) for index in owners.units}
    nbytes = sum(n * (sizes.reduce + sizes.of_unit(index).compute) for index, n in moved.items())
    return Division(owners.balance, nbytes)


def _counted(trace: ModelTrace) -> float:
    products = (p for use in trace.work.units for part in (use.forward, use.backward) for p in part.products)
    return sum(product.flops for product in products) / trace.work.tokens
