"""The placement of a unit on a mesh: the table of stages, and the hops between placements. Standard library only.

The ranks form a mesh of one or two axes; a stage is chosen for each. On an axis a kind of state is

    R   whole: equal on all ranks of the axis
    P   partial sums: each rank's own, in whole tensors; summed where the optimizer needs them
    S   cut: each rank holds one piece

and a stage of ZeRO (arXiv:1910.02054, §5) is a row of the table:

    stage   parameters   gradients   optimizer
      0         R            R           R
      1         R            P           S
      2         R            S           S
      3         S            S           S

P becomes S by a reduce-scatter, S becomes R by an all-gather, P becomes R by both. These are the *hops*. Gradients go
over the inner axis first and then over the outer one, gathers the other way round, so a byte crosses the outer axis
(between nodes) once an inner piece and not once a rank.

A unit is cut into `outer · inner` shards. Rank (m, s) owns shard s·M + m, its *position*: shards s·M to s·M + M - 1 are
the inner piece of all ranks (·, s), so each M-th bound of the cut is one between inner pieces. On one axis the position
is the rank.

    M = 2, S = 2     | shard 0 | shard 1 | shard 2 | shard 3 |
    inner piece      |----- ranks (·, 0) |----- ranks (·, 1) |
    owner            |  (0,0)  |  (1,0)  |  (0,1)  |  (1,1)  |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import groupby
from typing import Literal, TypeAlias

from zerokit.by_module import REST, is_by_module
from zerokit.errors import UsageError
from zerokit.layout import Cut, Interval, Layout, Unit

_WHOLE, _CUT = "R", "S"
_STATES = {"parameters": "RRRS", "gradients": "RPSS", "optimizer": "RSSS"}
"""The columns of the table, by stage."""


class Axis(IntEnum):
    """An axis of the mesh. `INNER` ranks lie close to each other, on one node say; a mesh of one axis has only it."""

    OUTER = 0
    INNER = 1


BOTH = (Axis.OUTER, Axis.INNER)


_NAMES = "0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters"

StageNumber: TypeAlias = Literal[0, 1, 2, 3]
StageOfAll: TypeAlias = StageNumber | tuple[StageNumber, StageNumber] | tuple[Literal["local"], StageNumber]
StageArgument: TypeAlias = StageOfAll | Mapping[str, StageOfAll] | Callable[[str], StageOfAll]
"""What arguments called `stage` take: a number, or one for each axis, (outer, inner), for all modules or by module
(`zerokit.by_module`). An outer axis that is "local" synchronises no gradients; `zerokit.LocalSteps` does its part."""


def stage_of(number: object) -> StageNumber:
    """The stage of this number. Raises `UsageError` for anything but 0, 1, 2 and 3."""
    if type(number) is not int or not 0 <= number <= 3:
        raise UsageError(f"stage {number!r} is unknown: {_NAMES}")
    return number  # type: ignore[return-value]  # it is one of these


def require_stage(stage: StageArgument) -> StageArgument:
    """`stage`, one or a pair, or these by module. Raises `UsageError` for anything else."""
    if not is_by_module(stage):
        for each in stage if isinstance(stage, tuple) else (stage,):
            stage_of(each)
    for one in stage.values() if isinstance(stage, Mapping) else ():
        require_stage(one)
    return stage


@dataclass(frozen=True, slots=True)
class Mesh:
    """The shape of the ranks: `outer` groups of `inner` ranks. Rank m·inner + s is the one at (m, s)."""

    outer: int
    inner: int

    @property
    def world(self) -> int:
        return self.outer * self.inner

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes with communication; one rank alone has the inner one."""
        return BOTH if self.outer > 1 else (Axis.INNER,)

    def position(self, rank: int) -> int:
        """Which shard of every unit `rank` owns."""
        m, s = divmod(rank, self.inner)
        return s * self.outer + m

    def rank(self, position: int) -> int:
        """The owner of the shard at `position`."""
        s, m = divmod(position, self.outer)
        return m * self.inner + s

    def size(self, axis: Axis) -> int:
        return self.inner if axis is Axis.INNER else self.outer

    def members(self, axis: Axis, rank: int) -> range:
        """The ranks on `axis` that include `rank`."""
        m, s = divmod(rank, self.inner)
        if axis is Axis.INNER:
            return range(m * self.inner, (m + 1) * self.inner)
        return range(s, self.world, self.inner)

    def cut(self, axis: Axis, unit: Unit, rank: int) -> Cut:
        """The cut over the ranks on `axis` that include `rank`: into inner pieces, or of one of these into shards."""
        if axis is Axis.INNER:
            return unit.cut.joined(self.outer)
        return unit.cut.part(self.position(rank) // self.outer * self.outer, self.outer)

    def between(self, rank: int, other: int) -> Axis:
        """The axis that lies between two ranks: the outer one, unless they are in one group of it."""
        return Axis.INNER if rank // self.inner == other // self.inner else Axis.OUTER

    def copies(self, axis: Axis) -> int:
        """The number of ranks that receive each element in a hop over `axis`, over the whole mesh."""
        return (self.inner - 1) * self.outer if axis is Axis.INNER else self.outer - 1


@dataclass(frozen=True)
class Placement:
    """The state that a rank holds between steps, and the axes that each kind of state crosses.

    `stages` is (outer, inner); on a mesh of one axis both are the same.
    """

    mesh: Mesh
    stages: tuple[int, int]

    @classmethod
    def of(cls, stage: object, mesh: Mesh) -> Placement:
        """The placement of a stage, or of one for each axis. Raises `UsageError` for invalid stages."""
        if not isinstance(stage, tuple | list):
            return cls(mesh, (stage_of(stage), stage_of(stage)))
        if len(stage) != 2:
            raise UsageError(f"stage {stage!r}: expected one stage, or two of them, (outer, inner)")
        outer, inner = map(stage_of, stage)
        if outer > inner:
            raise UsageError(
                f"stage {outer, inner}: the outer stage must not exceed the inner one, write stage={inner, outer}; "
                "state that is sharded between nodes must also be sharded inside them"
            )
        if mesh.outer == 1 and outer != inner:
            raise UsageError(
                f"stage {outer, inner} names two axes, but the mesh has one ({mesh.inner} ranks): pass "
                f"mesh=(outer, inner), for example mesh=(2, {max(mesh.inner // 2, 1)}), or one stage"
            )
        return cls(mesh, (outer, inner))

    def of_unit(self, index: int) -> Placement:
        """The placement of a unit: this one is that of all."""
        return self

    def argument(self, layout: Layout) -> StageOfAll:
        """The stage as arguments have it: on a mesh of two axes, (outer, inner)."""
        stages: tuple[StageNumber, StageNumber] = tuple(map(stage_of, self.stages))  # type: ignore[assignment]
        return stages if self.mesh.outer > 1 else stages[Axis.INNER]

    def _axes(self, kind: str, held: str) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.mesh.axes if _STATES[kind][self.stages[axis]] == held)

    # ---- the hops

    @cached_property
    def use(self) -> tuple[Axis, ...]:
        """The axes over which parameters are gathered for each use, because they are sharded."""
        return self._axes("parameters", _CUT)

    @cached_property
    def update(self) -> tuple[Axis, ...]:
        """The axes over which updated parameters are gathered after a step: whole parameters that owners update."""
        return tuple(axis for axis in self._axes("optimizer", _CUT) if axis not in self.use)

    @cached_property
    def sums(self) -> tuple[Axis, ...]:
        """The axes over which summed gradients return to every rank, because every rank updates the same elements."""
        return self._axes("gradients", _WHOLE)

    # ---- what a rank holds

    @cached_property
    def cuts_parameters(self) -> bool:
        return bool(self.use)

    @cached_property
    def cuts_gradients(self) -> bool:
        """Whether whole gradients exist only in flight; they then share a few buckets."""
        return _STATES["gradients"][self.stages[Axis.INNER]] == _CUT

    @cached_property
    def pooled_buckets(self) -> int:
        """The number of gradient buckets that small units share: one is filled while others are reduced.

        None where every unit keeps a whole bucket of its own.
        """
        if not self.cuts_gradients:
            return 0
        return 2 if self.cuts_parameters else 3

    def parameters(self, unit: Unit, position: int) -> Interval:
        """The elements of `unit` that a rank holds between steps."""
        return self._held("parameters", unit, position)

    def gradients(self, unit: Unit, position: int) -> Interval:
        """The elements whose gradients a rank holds between backward and step."""
        return self._held("gradients", unit, position)

    def updated(self, unit: Unit, position: int) -> Interval:
        """The elements that a rank's optimizer updates: it holds their masters and states."""
        return self._held("optimizer", unit, position)

    def _held(self, kind: str, unit: Unit, position: int) -> Interval:
        joined = self._joined(kind)
        return unit.cut.joined(joined).piece(position // joined)

    def _joined(self, kind: str) -> int:
        """How many neighbouring shards each rank holds of a kind of state: all of them where it is whole."""
        cut = self._axes(kind, _CUT)
        if Axis.INNER not in cut:
            return self.mesh.world
        return 1 if Axis.OUTER in cut else self.mesh.outer

    # ---- whole tensors

    def cut_of(self, kind: str, unit: Unit) -> Cut:
        """The cut of a kind of state, a column of the table. Neighbours hold the same piece where there are fewer."""
        return unit.cut.joined(self._joined(kind))

    def owners(self, unit: Unit) -> Cut:
        """The cut of the optimizer's states, whose pieces own the tensors that are updated whole."""
        return self.cut_of("optimizer", unit)

    def owner(self, position: int) -> int:
        """Which of these pieces a rank holds; where all hold the same, it is piece 0."""
        return position // self._joined("optimizer")

    def rank_of(self, owner: int, position: int) -> int:
        """The rank that holds a piece for the one at `position`: on the same place of an axis that does not cut it."""
        joined = self._joined("optimizer")
        return self.mesh.rank(owner * joined + position % joined)

    # ---- from one cut to another

    def moves(self, kind: str, before: Unit, after: Unit) -> Iterator[tuple[int, int, Interval]]:
        """What ranks get from others where a unit is cut anew: from, to, and the elements, in memory coordinates.

        `kind` is a column of the table. Ranks that hold the same get it each from its own place of the axis.
        """
        joined = self._joined(kind)
        old, new = before.cut.joined(joined), after.cut.joined(joined)
        for target in range(self.mesh.world):
            piece, copy = divmod(self.mesh.position(target), joined)
            wanted = new.piece(piece).intersection(old.whole)
            for source in old.owners(wanted):
                if source != piece:
                    rank = self.mesh.rank(source * joined + copy)
                    yield rank, target, old.piece(source).intersection(wanted)

    def passes(self, before: int, after: int) -> Iterator[tuple[int, int]]:
        """From which rank to which one a whole tensor goes where its owner changes."""
        joined = self._joined("optimizer")
        for copy in range(joined if before != after else 0):
            yield self.mesh.rank(before * joined + copy), self.mesh.rank(after * joined + copy)

    def __str__(self) -> str:
        outer, inner = self.stages
        return str(inner) if self.mesh.outer == 1 else f"{outer}/{inner}"


@dataclass(frozen=True)
class MixedPlacement:
    """The placements of units whose stages differ, by index; `placed` makes it."""

    mesh: Mesh
    units: tuple[Placement, ...]

    def of_unit(self, index: int) -> Placement:
        """The placement of a unit."""
        return self.units[index]

    @cached_property
    def cuts_parameters(self) -> bool:
        """Whether some unit's are cut."""
        return any(placement.cuts_parameters for placement in self.units)

    def argument(self, layout: Layout) -> StageArgument:
        """The stage as arguments have it, of each module with parameters."""
        return {
            parameter.name.rpartition(".")[0] or REST: self.units[unit.index].argument(layout)
            for unit in layout.units
            for parameter in unit.parameters
        }

    def __str__(self) -> str:
        runs = [(str(placement), len(list(run))) for placement, run in groupby(self.units)]
        return " + ".join(f"{stage} ({count} units)" for stage, count in runs)


AnyPlacement: TypeAlias = Placement | MixedPlacement
"""One placement for all units, or one for each."""


def placed(stages: Sequence[object], mesh: Mesh) -> AnyPlacement:
    """The placement of units that have these stages. Raises `UsageError` for invalid stages."""
    of_stage = {repr(stage): Placement.of(stage, mesh) for stage in stages}
    units = tuple(of_stage[repr(stage)] for stage in stages)
    return units[0] if len(set(units)) == 1 else MixedPlacement(mesh, units)


def without_lone_axis(stage: object, mesh: Mesh) -> tuple[object, Mesh]:
    """The mesh as one axis where the other one has a single rank, and of a pair of stages the one of that axis.

    So a script for N nodes runs on one node, and on nodes of one rank. Raises `UsageError` for invalid stages.
    """
    if 1 not in (mesh.outer, mesh.inner):
        return stage, mesh
    if isinstance(stage, tuple | list):
        stages = Placement.of(stage, Mesh(2, 2)).stages  # raises what it would on a mesh of two axes
        stage = stages[Axis.INNER if mesh.outer == 1 else Axis.OUTER]
    return stage, Mesh(1, mesh.world)
