"""Islands: ranks of the inner axis that train alone, if the outer stage of a mesh is "local".

An island is a process group of its own to the optimizer; `zerokit.LocalSteps` joins them from time to time.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zerokit.errors import ScheduleError, UsageError
from zerokit.placement import Axis, Mesh, stage_of
from zerokit.runtime.build import group_of_this_rank, mesh_of
from zerokit.runtime.collectives.groups import clone, destroy_unused_groups, note_user, timeout_of

LOCAL = "local"  # the outer stage of a mesh whose outer axis synchronises no gradients


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Islands:
    """The ranks of `everyone` as `mesh.outer` islands of `mesh.inner` ranks; this one is `rank` of `everyone`."""

    everyone: dist.ProcessGroup
    mesh: Mesh
    rank: int
    timeout: datetime.timedelta

    @property
    def count(self) -> int:
        return self.mesh.outer

    @property
    def world(self) -> int:
        """Ranks of all islands."""
        return self.mesh.world

    @property
    def index(self) -> int:
        """The number of this rank's island."""
        return self.rank // self.mesh.inner

    def group(self, axis: Axis, backend: str, user: object) -> dist.ProcessGroup:
        """A new process group of the ranks that `axis` joins with this one, for `user`; all ranks call it alike.

        Raises `ScheduleError` where one of them does not come.
        """
        members = self.mesh.members(axis, self.rank)
        try:
            made = clone(self.everyone, backend, self.timeout, members=members)
        except RuntimeError as error:
            raise ScheduleError(
                f"island {self.index} (rank {self.rank}): the ranks {', '.join(map(str, members))} did not all come "
                f"together within {self.timeout.total_seconds():g} s: {error}: look for the others' first error"
            ) from error
        if backend == "gloo":
            note_user(self.everyone, user, {str(axis): made})
        return made


def divide_into_islands(
    stage: Any, mesh: Any, process_group: dist.ProcessGroup | None
) -> tuple[Any, Any, dist.ProcessGroup | None, Islands | None]:
    """The stage, mesh and process group of this rank's island, and the islands; unchanged without local steps.

    Raises `UsageError` where the outer stage is "local" and there are no two islands.
    """
    if not (isinstance(stage, tuple | list) and len(stage) == 2 and stage[0] == LOCAL):
        return stage, mesh, process_group, None
    stage_of(stage[1])
    everyone = group_of_this_rank(process_group)
    sizes = getattr(mesh, "shape", mesh)
    if not isinstance(sizes, tuple | list) or len(sizes) != 2 or sizes[0] == 1:
        raise UsageError(
            f"stage={stage!r} with mesh={mesh!r}: islands need a mesh of two axes, (islands, ranks of an island); one "
            f"island has nothing to synchronise with: pass stage={stage[1]!r} without mesh"
        )
    shape = mesh_of(mesh, everyone)
    assert shape is not None
    timeout = timeout_of(everyone, torch.device("cpu"), torch.device("cuda")) or dist.default_pg_timeout
    islands = Islands(everyone, shape, everyone.rank(), timeout)
    backend = str(dist.get_backend_config(everyone))
    if "gloo" in backend and "nccl" not in backend:
        backend = "gloo"
        destroy_unused_groups(everyone)
    return stage[1], None, islands.group(Axis.INNER, backend, islands), islands
