"""Plans every candidate of stage, mesh, micro-batch and recomputation, and ranks those that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from zerokit.errors import UsageError
from zerokit.placement import Mesh
from zerokit.planning.cells import GIB, Cell, Plan, PlannedCell, Question
from zerokit.planning.estimates import Estimates
from zerokit.planning.hardware import USUAL_DISK
from zerokit.planning.kinds import lies_alike
from zerokit.planning.mixture import Mixture
from zerokit.planning.subject import Subject
from zerokit.planning.trace import Traces
from zerokit.sizes import ELSEWHERE


def plan_cells(subject: Subject, question: Question) -> Plan:
    """Plan every candidate. Raises `UsageError` for a model that cannot be traced, or a link that is not known."""
    planner = _Planner(subject, question)
    cells: list[PlannedCell] = []
    for homes in question.states:
        planner.homes += homes
        cells += planner.cells(homes)
        if any(not one.missing_bytes for one in cells):
            break
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


def _possible(mesh: Mesh, question: Question) -> Mesh:
    """The mesh. Raises `UsageError` for one along whose inner axis no shares can lie."""
    if question.kinds and not lies_alike(question.kinds, mesh):
        raise UsageError(
            f"mesh {mesh.outer}x{mesh.inner}: its {mesh.outer} groups of {mesh.inner} consecutive ranks have different "
            f"devices ({question.cluster.device.name}), and shares lie along the inner axis: give all groups the same "
            f"kinds in the same order, or --mesh 1x{mesh.world}"
        )
    return mesh


def _rank(one: PlannedCell) -> tuple[float, int]:
    """Faster first, then smaller; without times smaller first."""
    return (-round(one.units_per_s or 0.0, 3), one.memory.needed)


class _Planner:
    def __init__(self, subject: Subject, question: Question) -> None:
        self._subject, self._question = subject, question
        self._micro_batches = question.micro_batches or [1, 2, 4, 8, 16, 32, 64]
        traces = Traces(
            subject,
            on_cuda=question.on_cuda,
            bucket_mb=question.bucket_mb,
            exactly=len(self._micro_batches) == 1 and not question.kinds,
            module_stages=question.module_stages,
            optimizer=question.optimizer,
        )
        estimates = Estimates(subject, question, traces)
        first = estimates.trace(self._micro_batches[0], question.precisions[0], question.recompute[0])
        self._recompute = question.recompute if first.has_blocks else question.recompute[:1]
        self.parameters = first.layout.trainable_numel
        self._plan = Mixture(estimates, question).plan if question.kinds else estimates.plan
        self.homes: list[str] = []
        """Those of masters and states that were tried."""

    def cells(self, homes: Sequence[str]) -> Iterator[PlannedCell]:
        """Every candidate with states there; of micro-batches, in order, those up to the first that does not fit."""
        question = self._question
        for mesh in self._meshes():
            for stages in self._stages(mesh):
                for home, precision, recompute in product(homes, question.precisions, self._recompute):
                    for micro_batch in self._micro_batches:
                        found = [
                            self._plan(
                                Cell(mesh, stages, micro_batch, accumulate, recompute, precision, home)
                            )
                            for accumulate in self._accumulations(micro_batch)
                        ]
                        yield from found
                        if found and all(one.is_hopeless for one in found):
                            break

    def _meshes(self) -> list[Mesh]:
        question = self._question
        if question.meshes is not None:
            return [_possible(mesh, question) for mesh in question.meshes]
        line = [Mesh(1, question.world)]
        per_node = question.cluster.ranks_per_node
        if question.nodes == 1 or per_node == 1 or question.world % per_node:
            return line
        # On hosts several nodes always are an axis of their own, as `make_collectives` has it.
        nodes = Mesh(question.nodes, per_node)
        if question.kinds and not lies_alike(question.kinds, nodes):
            return line
        return [*(line if question.on_cuda else ()), nodes]

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

    def assumptions(self) -> tuple[str, ...]:
        """What figures rest on that nobody asked for."""
        question, device = self._question, self._question.cluster.device
        buckets = " and buckets" if question.bucket_mb is None else ""
        lines = [*self._subject.assumptions, f"AdamW, one group of parameters, default units{buckets}."]
        if question.optimizer == "muon":
            lines[-1] = (
                f"Muon for the matrices of the blocks, AdamW for the rest, default units{buckets}. One rank updates "
                "each matrix. Newton and Schulz's iterations take as long as the model's own products of that size; "
                "what they allocate is not counted."
            )
        if question.on_cuda:
            lines.append(
                "CUDA itself takes 0.5 GB of a device (pytorch/torchcomms#777); NCCL's buffers and fragments of "
                "torch's allocator are not counted."
            )
        if question.kinds:
            lines.append(
                "Shares follow what stays of each device beside its own samples, batches how fast it computes. The "
                "slowest link counts for all, and a step takes as long as on its slowest rank. NCCL's messages of "
                "unequal pieces are taken to be as fast as its collectives, which has not been measured."
            )
        elif question.efficiencies and device.flops:
            lines.append(
                f"Links and the device's speed are those of {device.name}'s table; measure one with zerokit bench."
            )
        if question.room_bytes is not None and not question.on_cuda:
            lines.append(
                f"A rank may take {question.room_bytes / GIB:,.1f} GiB, its share of what this host has free."
            )
        lines += [text for home in self.homes if home in ELSEWHERE for text in self._assumed_of(home)]
        if True in self._recompute:
            lines.append("Recomputation checkpoints the children of every outermost ModuleList.")
        if max(question.accumulate) > 1 or question.samples_per_step is not None:
            lines.append(
                "Micro-batches before the last run inside optimizer.accumulate(): whole gradients stay."
            )
        return tuple(lines)

    def _assumed_of(self, home: str) -> Iterator[str]:
        """What is assumed of the way of states to the host or a disk, and of the room there."""
        cluster = self._question.cluster
        way = cluster.way(home)
        if way is None:
            yield (
                f"No times with states on the host: how fast {cluster.device.name} copies is unknown. Give [host] with "
                "gb_per_s in a file for --cluster, or the doctor's output."
            )
            return
        if home == "host" and cluster.host is None:
            yield (
                f"Copies between {cluster.device.name} and its host reach {way.come / 1e9:g} GB/s each way at once. "
                "Use [host] in --cluster to change this."
            )
        if home == "disk" and cluster.disk is None:
            disk = USUAL_DISK
            yield (
                f"A node's disk reads {disk.come / 1e9:g} GB/s and writes {disk.leave / 1e9:g}, as one NVMe drive. Use "
                "[disk] in --cluster, or the doctor's output, to change this."
            )
        if way.room_bytes is None:
            place = "host" if home == "host" else "disk"
            yield f"A node's {place} has room for the states of all its ranks. Use room_gb in [{place}] to check it."
