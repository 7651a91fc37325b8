"""Candidates of stage, mesh, micro-batch and recomputation, with memory and time, ranked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zerokit.errors import UsageError
from zerokit.placement import Mesh, Placement
from zerokit.planning.efficiency import Efficiency
from zerokit.planning.hardware import Cluster
from zerokit.planning.memory import PlannedMemory, StepMemory, element_sizes
from zerokit.planning.recording import ModelTrace
from zerokit.planning.replay import Step
from zerokit.planning.subject import Subject, Traces
from zerokit.planning.timeline import Plan as Timed
from zerokit.planning.timeline import StepTime, step_time
from zerokit.runtime.precision import Precision

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to train: `stages` are those of the outer and the inner axis, `micro_batch` counts samples a rank."""

    mesh: Mesh
    stages: tuple[int, int]
    micro_batch: int
    accumulate: int
    recompute: bool
    precision: str

    @property
    def stage_label(self) -> str:
        """The stage, or outer/inner on two axes."""
        outer, inner = self.stages
        return str(inner) if self.mesh.outer == 1 else f"{outer}/{inner}"

    @property
    def label(self) -> str:
        """A short description of the cell."""
        words = [f"stage {self.stage_label}"]
        if self.mesh.outer > 1:
            words.append(f"mesh {self.mesh.outer}x{self.mesh.inner}")
        words.append(f"micro-batch {self.micro_batch}")
        if self.accumulate > 1:
            words.append(f"accumulating {self.accumulate}")
        if self.recompute:
            words.append("recomputing")
        return ", ".join(words)

    def optimizer_arguments(self, bucket_mb: float | None = None) -> str:
        """The call of `ZeroOptimizer` for this cell."""
        stage = f"stage={self.stages[1]}"
        if self.mesh.outer > 1:
            same = self.stages[0] == self.stages[1]
            stage = stage if same else f"stage={self.stages}"
            stage += f", mesh=({self.mesh.outer}, {self.mesh.inner})"
        bucket = "" if bucket_mb is None else f", bucket_mb={bucket_mb:g}"
        return f'ZeroOptimizer(model, torch.optim.AdamW, {stage}, precision="{self.precision}"{bucket})'

    def bench_line(self, subject: Subject, nodes: int, bucket_mb: float | None = None) -> str | None:
        """The command that measures the cell; None if bench cannot build the model."""
        if not subject.bench_options:
            return None
        words = ["zerokit", "bench", *subject.bench_options, "--stage", str(self.stages[1])]
        if self.mesh.outer > 1:
            words += ["--mesh", f"{self.mesh.outer}x{self.mesh.inner}"]
            if self.stages[0] != self.stages[1]:
                words += ["--outer-stage", str(self.stages[0])]
        words += ["--nodes", str(nodes), "--nproc-per-node", str(self.mesh.world // nodes)]
        words += ["--batch-size", str(self.micro_batch), "--precision", self.precision]
        if self.accumulate > 1:
            words += ["--accumulate", str(self.accumulate)]
        if self.recompute:
            words.append("--recompute")
        if bucket_mb is not None:
            words += ["--bucket-mb", f"{bucket_mb:g}"]
        return " ".join(words)


@dataclass(frozen=True)
class PlannedCell:
    """A cell with its memory, and its time if it fits and the device's speed is known."""

    cell: Cell
    memory: PlannedMemory
    room_bytes: int | None
    time: StepTime | None = None
    units_per_s: float | None = None
    """The rate of one device."""
    mfu: float | None = None

    @property
    def missing_bytes(self) -> int:
        """The bytes that the device lacks; 0 if the cell fits, or the device's memory is unknown."""
        return 0 if self.room_bytes is None else max(0, self.memory.needed - self.room_bytes)


@dataclass(frozen=True)
class Question:
    """The request of cells; a field that is None leaves the choice to the plan.

    Attributes:
        cluster: the devices and links.
        world: ranks, one a device.
        efficiencies: of the device, by precision; a precision without one is planned without times.
        meshes, stages, micro_batches, accumulate, recompute: those to choose from; `stages` are (outer, inner).
        samples_per_step: of all ranks together: then `accumulate` follows from the micro-batch.
        precisions: those to choose from.
        room_bytes: of a device; None where that is not known.
    """

    cluster: Cluster
    world: int
    efficiencies: Mapping[str, Efficiency]
    precisions: Sequence[str]
    meshes: Sequence[Mesh] | None = None
    stages: Sequence[tuple[int, int]] | None = None
    micro_batches: Sequence[int] | None = None
    accumulate: Sequence[int] = (1,)
    recompute: Sequence[bool] = (False, True)
    samples_per_step: int | None = None
    room_bytes: int | None = None
    on_cuda: bool = True
    bucket_mb: float | None = None

    @property
    def nodes(self) -> int:
        """The number of nodes for the ranks."""
        return self.cluster.nodes(self.world)


@dataclass(frozen=True)
class Plan:
    """Every candidate that fits, best first, and those that do not."""

    subject: Subject
    question: Question
    parameters: int
    fitting: tuple[PlannedCell, ...]
    too_large: tuple[PlannedCell, ...]
    assumptions: tuple[str, ...] = field(default=())

    @property
    def best(self) -> PlannedCell | None:
        """The fastest cell that fits; None if none fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def runner_up(self) -> PlannedCell | None:
        """The best cell that differs from the best one in stage, mesh, recomputation or precision."""
        if not self.fitting:
            return None
        first = self.fitting[0].cell
        return next((one for one in self.fitting if _kind(one.cell) != _kind(first)), None)

    @property
    def bench_line(self) -> str | None:
        """The command that measures the best cell; None if nothing fits, or bench cannot build the model."""
        best, question = self.best, self.question
        return (
            None if best is None else best.cell.bench_line(self.subject, question.nodes, question.bucket_mb)
        )

    @property
    def optimizer_arguments(self) -> str | None:
        """The call of `ZeroOptimizer` for the best cell; None if nothing fits."""
        return None if self.best is None else self.best.cell.optimizer_arguments(self.question.bucket_mb)

    @property
    def why(self) -> str:
        """The reason why the best cell is the best, in one sentence."""
        return explain(self)


_MOST_MICRO_BATCH = 64


def plan_cells(subject: Subject, question: Question, traces: Traces | None = None) -> Plan:
    """Plan every candidate. Raises `UsageError` for a model that cannot be traced, or a link that is not known."""
    if traces is None:
        few = question.micro_batches is not None and len(question.micro_batches) == 1
        traces = Traces(subject, on_cuda=question.on_cuda, bucket_mb=question.bucket_mb, exactly=few)
    planner = _Planner(subject, question, traces)
    cells = list(planner.cells())
    if not cells:
        raise UsageError(
            f"no cell: {question.samples_per_step} samples in a step are no multiple of {question.world} ranks and one "
            "of the micro-batches"
            if question.samples_per_step is not None
            else "no cell: none of the stages is possible on any of the meshes"
        )
    fitting = sorted((one for one in cells if not one.missing_bytes), key=_rank)
    too_large = sorted((one for one in cells if one.missing_bytes), key=lambda one: one.missing_bytes)
    return Plan(
        subject, question, planner.parameters, tuple(fitting), tuple(too_large), planner.assumptions()
    )


def _rank(one: PlannedCell) -> tuple[float, int]:
    """Faster first, then smaller; without times smaller first."""
    return (-round(one.units_per_s or 0.0, 3), one.memory.needed)


def _kind(cell: Cell) -> tuple[object, ...]:
    return cell.mesh, cell.stages, cell.recompute, cell.precision


class _Planner:
    def __init__(self, subject: Subject, question: Question, traces: Traces) -> None:
        self._subject, self._question, self._traces = subject, question, traces
        first = traces.get(self._micro_batches()[0], question.precisions[0], recompute=question.recompute[0])
        self._recompute = question.recompute if first.has_blocks else question.recompute[:1]
        self._layout = first.layout.for_world(question.world)
        self.parameters = first.layout.trainable_numel
        self._steps: dict[tuple[object, ...], StepMemory] = {}

    def _micro_batches(self) -> list[int]:
        question = self._question
        if question.micro_batches is not None:
            return list(question.micro_batches)
        return [2**power for power in range(_MOST_MICRO_BATCH.bit_length())]

    def cells(self) -> Iterator[PlannedCell]:
        """Every candidate; of micro-batches, in order, those up to the first that does not fit."""
        question = self._question
        for mesh in self._meshes():
            for stages in self._stages(mesh):
                for precision in question.precisions:
                    for recompute in self._recompute:
                        for micro_batch in self._micro_batches():
                            found = list(self._with(mesh, stages, precision, recompute, micro_batch))
                            yield from found
                            if found and all(one.missing_bytes for one in found):
                                break

    def _with(
        self, mesh: Mesh, stages: tuple[int, int], precision: str, recompute: bool, micro_batch: int
    ) -> Iterator[PlannedCell]:
        for accumulate in self._accumulations(micro_batch):
            yield self.plan(Cell(mesh, stages, micro_batch, accumulate, recompute, precision))

    def _meshes(self) -> list[Mesh]:
        question = self._question
        if question.meshes is not None:
            return list(question.meshes)
        line = [Mesh(1, question.world)]
        per_node = question.cluster.ranks_per_node
        if question.nodes == 1 or per_node == 1 or question.world % per_node:
            return line
        # On hosts several nodes always are an axis of their own, as `make_collectives` has it.
        return [*(line if question.on_cuda else ()), Mesh(question.nodes, per_node)]

    def _stages(self, mesh: Mesh) -> list[tuple[int, int]]:
        if self._question.stages is not None:
            return [stages for stages in self._question.stages if mesh.outer > 1 or stages[0] == stages[1]]
        return [
            (outer, inner)
            for inner in range(4)
            for outer in (range(inner + 1) if mesh.outer > 1 else (inner,))
        ]

    def _accumulations(self, micro_batch: int) -> list[int]:
        samples = self._question.samples_per_step
        if samples is None:
            return list(self._question.accumulate)
        count, rest = divmod(samples, micro_batch * self._question.world)
        return [count] if count and not rest else []

    def plan(self, cell: Cell) -> PlannedCell:
        """The memory of a cell, and its time where it fits."""
        question = self._question
        trace = self._traces.get(cell.micro_batch, cell.precision, recompute=cell.recompute)
        placement = Placement.of(cell.stages if cell.mesh.outer > 1 else cell.stages[1], cell.mesh)
        memory = self._memory_of(trace, placement, cell).of(trace)
        planned = PlannedCell(cell, memory, question.room_bytes)
        efficiency = question.efficiencies.get(cell.precision)
        if efficiency is None or planned.missing_bytes:
            return planned
        timed = Timed(
            trace.work,
            self._layout,
            placement,
            element_sizes(Precision.of(cell.precision)),
            micro_batches=cell.accumulate,
        )
        time = step_time(timed, question.cluster, efficiency)
        units_per_s = trace.work.tokens * cell.accumulate / time.total_s
        peak = question.cluster.device.flops.get(cell.precision)
        flops = self._subject.flops_per_unit or _counted(trace)
        mfu = units_per_s * flops / peak if peak else None
        return PlannedCell(cell, memory, question.room_bytes, time, units_per_s, mfu)

    def _memory_of(self, trace: ModelTrace, placement: Placement, cell: Cell) -> StepMemory:
        key = placement, min(cell.accumulate, 3), id(trace.events)
        if key not in self._steps:
            step = Step(
                self._layout,
                placement,
                element_sizes(Precision.of(cell.precision)),
                on_cuda=self._question.on_cuda,
                arriving=self._arriving(cell.mesh),
            )
            self._steps[key] = StepMemory(trace, step, accumulate=cell.accumulate)
        return self._steps[key]

    def _arriving(self, mesh: Mesh) -> int:
        """Ranks that sockets join, of hosts on several nodes."""
        if self._question.on_cuda or self._question.nodes == 1:
            return 0
        return mesh.outer if mesh.outer > 1 else mesh.inner

    def assumptions(self) -> tuple[str, ...]:
        """What figures rest on that nobody asked for."""
        question, device = self._question, self._question.cluster.device
        buckets = " and buckets" if question.bucket_mb is None else ""
        lines = [*self._subject.assumptions, f"AdamW, one group of parameters, default units{buckets}."]
        if question.on_cuda:
            lines.append(
                "CUDA itself takes 0.5 GB of a device (pytorch/torchcomms#777); NCCL's buffers and fragments of "
                "torch's allocator are not counted."
            )
        if question.efficiencies and device.flops:
            lines.append(
                f"Links and the device's speed are those of {device.name}'s table; measure one with zerokit bench."
            )
        if question.room_bytes is not None and not question.on_cuda:
            lines.append(
                f"A rank may take {question.room_bytes / GIB:,.1f} GiB, its share of what this host has free."
            )
        if True in self._recompute:
            lines.append("Recomputation checkpoints the children of every outermost ModuleList.")
        if max(question.accumulate) > 1 or question.samples_per_step is not None:
            lines.append(
                "Micro-batches before the last run inside optimizer.accumulate(): whole gradients stay."
            )
        return tuple(lines)


def _counted(trace: ModelTrace) -> float:
    products = (p for use in trace.work.units for part in (use.forward, use.backward) for p in part.products)
    return sum(product.flops for product in products) / trace.work.tokens


def explain(plan: Plan) -> str:
    """The reason why the best cell is the best, in one sentence. Raises `UsageError` where nothing fits."""
    best, other = plan.best, plan.runner_up
    if best is None:
        raise UsageError("no cell fits")
    room = "" if best.room_bytes is None else f" of {best.room_bytes / GIB:,.1f}"
    fits = f"needs {best.memory.needed / GIB:,.1f}{room} GiB"
    if best.time is None or best.units_per_s is None:
        return f"{_sentence(best.cell.label)} {fits}, the least of all cells that were asked for."
    if other is None:
        none = "fits" if plan.too_large else "was asked for"
        return f"{_sentence(best.cell.label)} {fits}; no other stage, mesh or recomputation {none}."
    if other.time is None or other.units_per_s is None:
        return f"{_sentence(best.cell.label)} {fits}; only {best.cell.precision} has times."
    ahead = best.units_per_s / other.units_per_s - 1
    name = other.cell.label
    if other.cell.precision != best.cell.precision:
        name += f" in {other.cell.precision}"
    rank = f"is {ahead:.1%} faster than {name}"
    if ahead < 0.0005:
        rank = f"is as fast as {name}"
    return f"{_sentence(best.cell.label)} {rank}, which {_difference(best, other)}; it {fits}."


def _difference(best: PlannedCell, other: PlannedCell) -> str:
    """What the other cell spends more of, a sample of a rank."""
    assert best.time is not None
    assert other.time is not None
    mine, its = (one.cell.micro_batch * one.cell.accumulate for one in (best, other))
    costs = {
        "computing": (best.time.compute_s, other.time.compute_s),
        "waiting for communication": (best.time.exposed_total_s, other.time.exposed_total_s),
        "computing more slowly beside communication": (best.time.slowed_s, other.time.slowed_s),
        "updating": (best.time.optimizer_s, other.time.optimizer_s),
    }
    more = {name: there / its - here / mine for name, (here, there) in costs.items()}
    name = max(more, key=lambda one: more[one])
    if more[name] <= 0 or other.units_per_s == best.units_per_s:
        more_bytes = other.memory.needed - best.memory.needed
        if abs(more_bytes) < 2**20:
            return "needs as much memory"
        return f"needs {abs(more_bytes) / 2**20:,.0f} MiB {'more' if more_bytes > 0 else 'less'}"
    return f"spends {more[name] * 1e3:,.3g} ms more a sample {name}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def best_of_each(cells: Iterable[PlannedCell]) -> list[PlannedCell]:
    """The first of each stage, mesh and precision, in the order of `cells`."""
    found: dict[object, PlannedCell] = {}
    for one in cells:
        found.setdefault((one.cell.mesh, one.cell.stages, one.cell.precision), one)
    return list(found.values())


def exposed_ms(time: StepTime) -> dict[str, float]:
    """Exposed communication of each axis, in milliseconds."""
    return {axis.name.lower(): seconds * 1e3 for axis, seconds in time.exposed_s.items()}
