"""Islands: ranks of the inner axis that train alone, if the outer stage of a mesh is "local".

An island is a process group of its own to the optimizer; `zerokit.LocalSteps` joins them from time to time.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from zerokit.errors import ScheduleError, UsageError
from zerokit.placement import Axis, Mesh, stage_of
from zerokit.runtime import optimizer as runtime
from zerokit.runtime.collectives.groups import clone, destroy_unused_groups, note_user, timeout_of
from zerokit.runtime.options import Options, group_of_this_rank, mesh_of

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


class ZeroOptimizer(runtime.ZeroOptimizer):  # noqa: D101
    __doc__ = runtime.ZeroOptimizer.__doc__

    def with_own_ranks(self, options: Options) -> Options:
        """Options for the ranks of this one's island, if the outer stage is "local"."""
        stage: Any = options.stage
        stages = list(stage.values()) if isinstance(stage, Mapping) else [stage]
        local = [isinstance(one, tuple | list) and len(one) == 2 and one[0] == LOCAL for one in stages]
        if not any(local):
            return options
        if options.shares is not None:
            raise UsageError(
                "shares= does not go with islands, whose pieces are averaged one with another: leave it out"
            )
        if not all(local):
            raise UsageError(
                f"stage={stage!r}: the outer axis is {LOCAL!r} for all modules or for none, because an island is a "
                "group of ranks: give every module such a pair"
            )
        self.islands = islands = _divide(options)
        backend = str(dist.get_backend_config(islands.everyone))
        if "gloo" in backend and "nccl" not in backend:
            backend = "gloo"
            destroy_unused_groups(islands.everyone)
        own = islands.group(Axis.INNER, backend, islands)
        inner = {key: one[1] for key, one in stage.items()} if isinstance(stage, Mapping) else stage[1]
        return replace(options, stage=inner, mesh=None, process_group=own)

    def require_steppable(self) -> None:
        super().require_steppable()
        if self.islands is not None and self.local_steps is None:
            raise UsageError(
                "step() of an island that nothing would ever synchronise with the others: make "
                "zerokit.LocalSteps(optimizer, every=...) before"
            )

    def after_update(self) -> None:
        if self.local_steps is not None:
            try:
                self.local_steps.after_step()  # also where the step was skipped: islands must count alike
            except ScheduleError:  # which leaves the weights of this step on all ranks of the island
                self.refuse("")
                raise

    def state_dict(self) -> dict[str, Any]:
        self._require_no_local_steps("state_dict()")
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._require_no_local_steps("load_state_dict()")
        super().load_state_dict(state_dict)

    def _require_no_local_steps(self, call: str) -> None:
        if self.local_steps is not None:
            raise UsageError(
                f"{call} of an optimizer with LocalSteps would leave out their anchor and position in the round: use "
                "zerokit.save() and zerokit.load()"
            )


def _divide(options: Options) -> Islands:
    """The islands of a mesh whose outer stage is "local". Raises `UsageError` where there are no two."""
    stage: Any = options.stage
    inner = [one[1] for one in (stage.values() if isinstance(stage, Mapping) else [stage])]
    for each in inner:
        stage_of(each)
    everyone = group_of_this_rank(options.process_group)
    sizes = getattr(options.mesh, "shape", options.mesh)
    if not isinstance(sizes, tuple | list) or len(sizes) != 2 or sizes[0] == 1:
        raise UsageError(
            f"stage={stage!r} with mesh={options.mesh!r}: islands need a mesh of two axes, (islands, ranks of an "
            f"island); one island has nothing to synchronise with: pass stage={inner[0]!r} without mesh"
        )
    shape = mesh_of(options.mesh, everyone)
    assert shape is not None
    timeout = timeout_of(everyone, torch.device("cpu"), torch.device("cuda")) or dist.default_pg_timeout
    return Islands(everyone, shape, everyone.rank(), timeout)
