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
the inner piece of all ranks (·, s). On one axis the position is the rank.

    M = 2, S = 2     | shard 0 | shard 1 | shard 2 | shard 3 |
    inner piece      |----- ranks (·, 0) |----- ranks (·, 1) |
    owner            |  (0,0)  |  (1,0)  |  (0,1)  |  (1,1)  |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import Literal, TypeAlias

from zerokit.errors import UsageError
from zerokit.layout import Interval, Unit


class Held(Enum):
    """The placement of a kind of state on one axis."""

    WHOLE = "R"
    PARTIAL = "P"
    CUT = "S"


class Axis(IntEnum):
    """An axis of the mesh. `INNER` ranks lie close to each other, on one node say; a mesh of one axis has only it."""

    OUTER = 0
    INNER = 1


BOTH = (Axis.OUTER, Axis.INNER)


@dataclass(frozen=True, slots=True)
class Row:
    """A stage: the placement of each kind of state on an axis."""

    parameters: Held
    gradients: Held
    optimizer: Held


_ROWS = tuple(Row(*map(Held, letters)) for letters in ("RRR", "RPS", "RSS", "SSS"))
_NAMES = "0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters"

StageNumber: TypeAlias = Literal[0, 1, 2, 3]
StageArgument: TypeAlias = (
    StageNumber | tuple[StageNumber, StageNumber] | tuple[Literal["local"], StageNumber]
)
"""What arguments called `stage` take: a number, or one for each axis, (outer, inner). An outer axis that is "local"
synchronises no gradients; `zerokit.LocalSteps` does its part."""


def row_of(stage: object) -> Row:
    """The row of a stage. Raises `UsageError` for a stage other than 0, 1, 2 and 3."""
    if type(stage) is not int or not 0 <= stage <= 3:
        raise UsageError(f"stage {stage!r} is unknown: {_NAMES}")
    return _ROWS[stage]


def require_stage(stage: StageArgument) -> StageArgument:
    """`stage`, one or a pair. Raises `UsageError` for anything else."""
    for each in stage if isinstance(stage, tuple) else (stage,):
        row_of(each)
    return stage


def stage_of(number: int) -> StageNumber:
    """The stage of this number. Raises `UsageError` for other numbers."""
    row_of(number)
    return number  # type: ignore[return-value]  # row_of has looked


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
            row_of(stage)
            return cls(mesh, (stage, stage))  # type: ignore[arg-type]  # row_of has looked
        if len(stage) != 2:
            raise UsageError(f"stage {stage!r}: expected one stage, or two of them, (outer, inner)")
        for each in stage:
            row_of(each)
        outer, inner = stage
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

    def _row(self, axis: Axis) -> Row:
        return _ROWS[self.stages[axis]]

    def _axes(self, kind: str, held: Held) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.mesh.axes if getattr(self._row(axis), kind) is held)

    # ---- the hops

    @cached_property
    def use(self) -> tuple[Axis, ...]:
        """The axes over which parameters are gathered for each use, because they are sharded."""
        return self._axes("parameters", Held.CUT)

    @cached_property
    def update(self) -> tuple[Axis, ...]:
        """The axes over which updated parameters are gathered after a step: whole parameters that owners update."""
        return tuple(axis for axis in self._axes("optimizer", Held.CUT) if axis not in self.use)

    @cached_property
    def sums(self) -> tuple[Axis, ...]:
        """The axes over which summed gradients return to every rank, because every rank updates the same elements."""
        return self._axes("gradients", Held.WHOLE)

    # ---- what a rank holds

    @cached_property
    def cuts_parameters(self) -> bool:
        return bool(self.use)

    @cached_property
    def cuts_gradients(self) -> bool:
        """Whether whole gradients exist only in flight; they then share a few buckets."""
        return self._row(Axis.INNER).gradients is Held.CUT

    @cached_property
    def pooled_buckets(self) -> int:
        """The number of gradient buckets that small units share: one is filled while others are reduced.

        None where every unit keeps a whole bucket of its own.
        """
        if not self.cuts_gradients:
            return 0
        return 2 if self.cuts_parameters else 3

    def inner_piece(self, unit: Unit, position: int) -> Interval:
        """The elements that ranks (·, s) own together; on one axis, the unit's shard."""
        size = unit.shard_numel * self.mesh.outer
        start = position // self.mesh.outer * size
        return Interval(start, start + size)

    def sent_outward(self, unit: Unit, position: int) -> Interval:
        """The elements whose gradients a rank sends over the outermost axis, after the inner sums."""
        return Interval(0, unit.numel) if self.mesh.outer == 1 else self.inner_piece(unit, position)

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
        cut = self._axes(kind, Held.CUT)
        if Axis.INNER not in cut:
            return Interval(0, unit.numel)
        if Axis.OUTER in cut or self.mesh.outer == 1:
            return unit.shard(position)
        return self.inner_piece(unit, position)

    def __str__(self) -> str:
        outer, inner = self.stages
        return str(inner) if self.mesh.outer == 1 else f"{outer}/{inner}"
