"""Cells of stage, mesh, micro-batch and recomputation, with memory and time, and why one is the best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zerokit.errors import UsageError
from zerokit.placement import Mesh, StageNumber
from zerokit.planning.efficiency import Efficiency
from zerokit.planning.hardware import Cluster
from zerokit.planning.kinds import Kind
from zerokit.planning.memory import PlannedMemory, lacking_bytes
from zerokit.planning.mixed import Mixed, tightest
from zerokit.planning.subject import Subject
from zerokit.planning.timeline import StepTime

GIB = 2.0**30
STATES = {
    "device": "states on the device",
    "host": "states on the host",
    "disk": "states on disk",
    "fp8": "moments in fp8",
}
"""Homes of masters and states in words."""
STATES_PATH = "/nvme"
"""Stands for a directory on a node's disk."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to train: `stages` are those of the outer and the inner axis, `micro_batch` counts samples a rank.

    `states` is where masters and states are between steps (`zerokit.sizes.HOMES`).
    """

    mesh: Mesh
    stages: tuple[int, int]
    micro_batch: int
    accumulate: int
    recompute: bool
    precision: str
    states: str = "device"

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
        if self.states != "device":
            words.append(STATES[self.states])
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Division:
    """How updates of whole tensors are divided: what the busiest rank computes by the mean over ranks, and the bytes
    that move to owners and back in a step, over all ranks.
    """

    balance: float
    exchanged_bytes: int


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
    division: Division | None = None
    """How updates of whole tensors are divided among ranks, if there are any."""

    away_room_bytes: int | None = None
    """The room for a rank's states on its host or disk, where they are there; None where that is not known."""
    mixed: Mixed | None = None
    """The division among different devices. Memory is then that of the tightest kind, the time that of the slowest."""

    @property
    def missing_bytes(self) -> int:
        """The bytes that the device lacks, or else the host or disk; 0 if the cell fits, or the room is unknown."""
        return lacking_bytes(self.memory, self.room_bytes, self.away_room_bytes)

    @property
    def is_hopeless(self) -> bool:
        """Whether it does not fit, and neither would equal shares and batches on different devices."""
        return self.missing_bytes > 0 and (self.mixed is None or self.mixed.equal.tight is not None)

    @property
    def equal_units_per_s(self) -> float:
        """The rate with equal shares and batches on different devices; 0 if that does not fit or is not known."""
        longer = None if self.mixed is None else self.mixed.equal.longer
        return 0.0 if longer is None or self.units_per_s is None else self.units_per_s / longer

    @property
    def on_kind(self) -> str:
        """On which kind of device memory is tightest, where there are several."""
        return "" if self.mixed is None else f" on {tightest(self.mixed.parts).kind}"

    @property
    def lack(self) -> str:
        """What is needed, and how much of it is missing."""
        on_device = self.room_bytes is not None and self.memory.needed > self.room_bytes
        needed, where = (
            (self.memory.needed, "") if on_device else (self.memory.away, f" of {STATES[self.cell.states]}")
        )
        return f"{needed / GIB:,.1f} GiB{where}{self.on_kind}, {self.missing_bytes / GIB:,.1f} GiB more than there is"


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
        module_stages: of modules that have a stage of their own in every cell, by path.
        optimizer: "adamw", or "muon" for the matrices of the blocks.
        states: homes of masters and states to choose from, by turns: of several tuples, the next one is tried where
            nothing fits with those before.
        kinds: the devices of ranks, where they differ. `cluster.device`, `efficiencies` and `room_bytes` then stand for
            all of them.
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
    module_stages: Mapping[str, StageNumber] = field(default_factory=dict)
    optimizer: str = "adamw"
    states: Sequence[tuple[str, ...]] = (("device",),)
    kinds: tuple[Kind, ...] = ()

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
        question = self.question
        if self.best is None or not self.subject.bench_options or question.module_stages or question.kinds:
            return None
        cell = self.best.cell
        words = ["zerokit", "bench", *self.subject.bench_options, "--stage", str(cell.stages[1])]
        if cell.mesh.outer > 1:
            words += ["--mesh", f"{cell.mesh.outer}x{cell.mesh.inner}"]
            if cell.stages[0] != cell.stages[1]:
                words += ["--outer-stage", str(cell.stages[0])]
        words += ["--nodes", str(question.nodes), "--nproc-per-node", str(cell.mesh.world // question.nodes)]
        words += ["--batch-size", str(cell.micro_batch), "--precision", cell.precision]
        if cell.accumulate > 1:
            words += ["--accumulate", str(cell.accumulate)]
        if cell.recompute:
            words.append("--recompute")
        if question.optimizer != "adamw":
            words += ["--optimizer", question.optimizer]
        if cell.states != "device":
            words += ["--states", STATES_PATH if cell.states == "disk" else cell.states]
        if question.bucket_mb is not None:
            words += ["--bucket-mb", f"{question.bucket_mb:g}"]
        return " ".join(words)

    @property
    def optimizer_arguments(self) -> str | None:
        """The call of `ZeroOptimizer` for the best cell; None if nothing fits."""
        if self.best is None:
            return None
        cell, bucket_mb = self.best.cell, self.question.bucket_mb
        stages = repr(cell.stages if cell.stages[0] != cell.stages[1] else cell.stages[1])
        if self.question.module_stages:
            own = "".join(f'"{path}": {own}, ' for path, own in self.question.module_stages.items())
            stages = f'{{{own}"*": {stages}}}'
        stage = f"stage={stages}"
        if cell.mesh.outer > 1:
            stage += f", mesh=({cell.mesh.outer}, {cell.mesh.inner})"
        bucket = "" if bucket_mb is None else f", bucket_mb={bucket_mb:g}"
        home = STATES_PATH if cell.states == "disk" else cell.states
        states = "" if home == "device" else f', states="{home}"'
        classes = "torch.optim.AdamW"
        if self.question.optimizer == "muon":
            classes = "{torch.optim.Muon: matrices, torch.optim.AdamW: rest}"
        shares = "" if self.best.mixed is None else self.best.mixed.shares_argument
        return (
            f'ZeroOptimizer(model, {classes}, {stage}, precision="{cell.precision}"{shares}{bucket}{states})'
        )

    @property
    def batches_call(self) -> str | None:
        """The call of `Batches` for the best cell on different devices; None on equal ones, or if nothing fits."""
        if self.best is None or self.best.mixed is None:
            return None
        return self.best.mixed.batches_call(self.best.cell.accumulate)

    @property
    def bought(self) -> str | None:
        """What unequal shares and batches are good for in the best cell; None on equal devices, or if nothing fits."""
        best = self.best
        if best is None or best.mixed is None:
            return None
        text, equal = best.mixed.bought, self._best_equal
        if equal is None or equal is best or best.units_per_s is None:
            return text
        longer = best.units_per_s / equal.equal_units_per_s
        return f"{text} The best cell with equal ones, {equal.cell.label}, takes {longer:.2f} times as long a sample."

    @property
    def _best_equal(self) -> PlannedCell | None:
        """The fastest cell on different devices with equal shares and batches."""
        return max(
            (one for one in self.fitting if one.equal_units_per_s),
            key=lambda one: one.equal_units_per_s,
            default=None,
        )

    @property
    def exchanged(self) -> str | None:
        """How the best cell's updates of whole matrices are divided; None where there are none, or nothing fits."""
        if self.best is None or self.best.division is None:
            return None
        division, held = self.best.division, self.best.memory.held.exchange
        return (
            f"Each matrix is updated by the rank that owns it. The busiest rank computes {division.balance:.2f} times "
            f"the mean; {division.exchanged_bytes / GIB:,.2f} GiB move there and back in a step, over all ranks, of "
            f"which a rank holds at most {held / GIB:,.2f} GiB at once."
        )

    @property
    def visits(self) -> str | None:
        """What states that are not on the device cost in the best cell; None where they are, or nothing fits."""
        best = self.best
        if best is None or best.cell.states == "device":
            return None
        if best.cell.states == "fp8":
            return (
                "Moments are kept in fp8 with a scale for each 64, in 2.125 bytes a parameter where fp32 takes 8. Each "
                "step rounds them, so losses differ from those with states in fp32."
            )
        held, time, where = best.memory.held, best.time, STATES[best.cell.states].removeprefix("states ")
        text = (
            f"A rank's masters and states, {_size(best.memory.away)}, are {where} and visit the device unit by "
            f"unit in every step, through buffers of {_size(held.visiting)}."
        )
        if time is None:
            return text
        share = time.visits_s / time.total_s
        return (
            f"{text} The update waits {time.visits_s * 1e3:,.0f} ms for them, {share:.0%} of the step. Nothing "
            "hides this; more micro-batches in a step make it a smaller part. Losses have the same bits as "
            "with states on the device."
        )

    @property
    def why(self) -> str:
        """The reason why the best cell is the best, in a sentence or two. Raises `UsageError` where nothing fits."""
        best, other = self.best, self.runner_up
        if best is None:
            raise UsageError("no cell fits")
        room = "" if best.room_bytes is None else f" of {best.room_bytes / GIB:,.1f}"
        fits = f"needs {best.memory.needed / GIB:,.1f}{room} GiB{best.on_kind}"
        name = best.cell.label[0].upper() + best.cell.label[1:]
        if best.time is None or best.units_per_s is None:
            return f"{name} {fits}, the least of all cells that were asked for."
        if other is None:
            none = "fits" if self.too_large else "was asked for"
            return f"{name} {fits}; no other stage, mesh or recomputation {none}."
        if other.time is None or other.units_per_s is None:
            return f"{name} {fits}; only {best.cell.precision} has times."
        others = other.cell.label
        if other.cell.precision != best.cell.precision:
            others += f" in {other.cell.precision}"
        ahead = best.units_per_s / other.units_per_s - 1
        rank = f"is {ahead:.1%} faster than" if ahead >= 0.0005 else "is as fast as"
        return f"{name} {rank} {others}; the latter {_difference(best, other)}. The former {fits}."


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:,.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:,.1f} MiB"


def _kind(cell: Cell) -> tuple[object, ...]:
    return cell.mesh, cell.stages, cell.recompute, cell.precision, cell.states


def _difference(best: PlannedCell, other: PlannedCell) -> str:
    """What the other cell loses most time with, per sample of a rank."""
    assert best.time is not None
    assert other.time is not None
    mine, its = (one.cell.micro_batch * one.cell.accumulate for one in (best, other))
    costs = {
        "computes {} ms longer per sample": (best.time.compute_s, other.time.compute_s),
        "waits {} ms longer per sample for communication": (
            best.time.exposed_total_s,
            other.time.exposed_total_s,
        ),
        "loses {} ms more per sample because communication slows the computation": (
            best.time.slowed_s,
            other.time.slowed_s,
        ),
        "updates for {} ms longer per sample": (best.time.optimizer_s, other.time.optimizer_s),
        "waits {} ms longer per sample for states that visit": (best.time.visits_s, other.time.visits_s),
    }
    more = {sentence: there / its - here / mine for sentence, (here, there) in costs.items()}
    sentence = max(more, key=lambda one: more[one])
    if more[sentence] <= 0 or other.units_per_s == best.units_per_s:
        more_bytes = other.memory.needed - best.memory.needed
        if abs(more_bytes) < 2**20:
            return "needs as much memory"
        return f"needs {abs(more_bytes) / 2**20:,.0f} MiB {'more' if more_bytes > 0 else 'less'}"
    return sentence.format(f"{more[sentence] * 1e3:,.3g}")


def best_of_each(cells: Iterable[PlannedCell]) -> list[PlannedCell]:
    """The first of each stage, mesh, precision and home of states, in the order of `cells`."""
    found: dict[object, PlannedCell] = {}
    for one in cells:
        cell = one.cell
        found.setdefault((cell.mesh, cell.stages, cell.precision, cell.states), one)
    return list(found.values())


def hopeless(plan: Plan) -> list[PlannedCell]:
    """The nearest miss of each stage, mesh, precision and home of states of which nothing fits."""
    return [one for one in best_of_each((*plan.fitting, *plan.too_large)) if one.missing_bytes]
